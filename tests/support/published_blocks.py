"""Blocks of published models in transformers, their configuration, and their parameters under our names."""

import torch
from torch import Tensor

from maxmoe.config import MoEConfig

FAMILIES = (
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v3",
    "gpt_oss",
    "llama4",
    "longcat_flash",
    "nemotron_h",
)


def with_random_parameters(block: torch.nn.Module) -> torch.nn.Module:
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block.float()


def gate_up_down(experts: torch.nn.Module, *, transposed: bool) -> dict[str, Tensor]:
    """transformers keeps gate and up in one [E, 2F, D] tensor, Llama 4 in [E, D, 2F]."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate, up = gate_up.chunk(2, -1)
    return {"experts.gate_proj": gate, "experts.up_proj": up, "experts.down_proj": down}


def shared(mlp: torch.nn.Module) -> dict[str, Tensor]:
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"shared_experts.{name}": getattr(mlp, name).weight.T for name in names}


def mixtral() -> tuple[torch.nn.Module, MoEConfig, dict[str, Tensor]]:
    from transformers.models.mixtral import modeling_mixtral as source

    sizes = source.MixtralConfig(hidden_size=12, intermediate_size=10, num_local_experts=6, num_experts_per_tok=2)
    block = with_random_parameters(source.MixtralSparseMoeBlock(sizes))
    config = MoEConfig(hidden_size=12, intermediate_size=10, num_experts=6, top_k=2)
    return block, config, {"router.weight": block.gate.weight, **gate_up_down(block.experts, transposed=True)}


def qwen3_moe() -> tuple[torch.nn.Module, MoEConfig, dict[str, Tensor]]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as source

    sizes = source.Qwen3MoeConfig(
        hidden_size=12, moe_intermediate_size=10, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True
    )
    block = with_random_parameters(source.Qwen3MoeSparseMoeBlock(sizes))
    config = MoEConfig(hidden_size=12, intermediate_size=10, num_experts=6, top_k=3)
    return block, config, {"router.weight": block.gate.weight, **gate_up_down(block.experts, transposed=True)}


def qwen2_moe() -> tuple[torch.nn.Module, MoEConfig, dict[str, Tensor]]:
    """A shared expert with its gate, and weights that are not normalised."""
    from transformers.models.qwen2_moe import modeling_qwen2_moe as source

    sizes = source.Qwen2MoeConfig(
        hidden_size=12,
        moe_intermediate_size=10,
        shared_expert_intermediate_size=20,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    )
    block = with_random_parameters(source.Qwen2MoeSparseMoeBlock(sizes))
    config = MoEConfig(
        hidden_size=12,
        intermediate_size=10,
        num_experts=6,
        top_k=2,
        normalization="none",
        num_shared_experts=2,
        shared_expert_gate=True,
    )
    parameters = {"router.weight": block.gate.weight, **gate_up_down(block.experts, transposed=True)}
    parameters |= shared(block.shared_expert)
    parameters["shared_experts.output_gate"] = block.shared_expert_gate.weight[0]
    return block, config, parameters


def deepseek_v3() -> tuple[torch.nn.Module, MoEConfig, dict[str, Tensor]]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as source

    sizes = source.DeepseekV3Config(
        hidden_size=12,
        moe_intermediate_size=10,
        n_routed_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    block = with_random_parameters(source.DeepseekV3MoE(sizes))
    torch.nn.init.normal_(block.gate.e_score_correction_bias, std=0.2)
    config = MoEConfig(
        hidden_size=12,
        intermediate_size=10,
        num_experts=12,
        top_k=4,
        score_function="sigmoid",
        score_correction_bias=True,
        num_groups=4,
        top_k_groups=2,
        routed_scaling_factor=2.5,
        num_shared_experts=2,
    )
    parameters = {"router.weight": block.gate.weight, **gate_up_down(block.experts, transposed=True)}
    parameters["router.score_correction_bias"] = block.gate.e_score_correction_bias
    return block, config, parameters | shared(block.shared_experts)


def gpt_oss() -> tuple[torch.nn.Module, MoEConfig, dict[str, Tensor]]:
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    sizes = source.GptOssConfig(hidden_size=12, intermediate_size=10, num_local_experts=6, num_experts_per_tok=2)
    block = with_random_parameters(source.GptOssMLP(sizes))
    config = MoEConfig(
        hidden_size=12,
        intermediate_size=10,
        num_experts=6,
        top_k=2,
        score_function="identity",
        router_bias=True,
        normalization="softmax",
        activation="swigluoai",
        activation_limit=7.0,
        expert_bias=True,
    )
    router, experts = block.router, block.experts
    return (
        block,
        config,
        {
            "router.weight": router.weight,
            "router.bias": router.bias,
            "experts.gate_proj": experts.gate_up_proj[..., ::2],
            "experts.up_proj": experts.gate_up_proj[..., 1::2],
            "experts.down_proj": experts.down_proj,
            "experts.gate_bias": experts.gate_up_proj_bias[..., ::2],
            "experts.up_bias": experts.gate_up_proj_bias[..., 1::2],
            "experts.down_bias": experts.down_proj_bias,
        },
    )


def llama4() -> tuple[torch.nn.Module, MoEConfig, dict[str, Tensor]]:
    from transformers.models.llama4 import modeling_llama4 as source

    sizes = source.Llama4TextConfig(hidden_size=12, intermediate_size=10, num_local_experts=6, num_experts_per_tok=1)
    block = with_random_parameters(source.Llama4TextMoe(sizes))
    config = MoEConfig(
        hidden_size=12,
        intermediate_size=10,
        num_experts=6,
        top_k=1,
        score_function="sigmoid",
        normalization="none",
        apply_weights_to="input",
        num_shared_experts=1,
    )
    parameters = {"router.weight": block.router.weight, **gate_up_down(block.experts, transposed=False)}
    return block, config, parameters | shared(block.shared_expert)


def longcat_flash() -> tuple[torch.nn.Module, MoEConfig, dict[str, Tensor]]:
    """Experts that return their input; the block has unused matrices for them in gate and up."""
    from transformers.models.longcat_flash import modeling_longcat_flash as source

    sizes = source.LongcatFlashConfig(
        hidden_size=12,
        expert_ffn_hidden_size=10,
        n_routed_experts=6,
        zero_expert_num=4,
        moe_topk=5,
        routed_scaling_factor=2.5,
    )
    block = with_random_parameters(source.LongcatFlashMoE(sizes))
    torch.nn.init.normal_(block.router.e_score_correction_bias, std=0.2)
    config = MoEConfig(
        hidden_size=12,
        intermediate_size=10,
        num_experts=6,
        num_copy_experts=4,
        top_k=5,
        score_correction_bias=True,
        normalization="none",
        routed_scaling_factor=2.5,
    )
    parameters = {"router.weight": block.router.classifier.weight, **gate_up_down(block.experts, transposed=True)}
    parameters["experts.gate_proj"] = parameters["experts.gate_proj"][:6]
    parameters["experts.up_proj"] = parameters["experts.up_proj"][:6]
    parameters["router.score_correction_bias"] = block.router.e_score_correction_bias
    return block, config, parameters


def nemotron_h() -> tuple[torch.nn.Module, MoEConfig, dict[str, Tensor]]:
    """Latent experts without gate, and a shared expert that reads the tokens themselves."""
    from transformers.models.nemotron_h import modeling_nemotron_h as source

    sizes = source.NemotronHConfig(
        hidden_size=12,
        moe_intermediate_size=10,
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=7,
        n_routed_experts=6,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
    )
    block = with_random_parameters(source.NemotronHMoE(sizes))
    torch.nn.init.normal_(block.gate.e_score_correction_bias, std=0.2)
    config = MoEConfig(
        hidden_size=12,
        intermediate_size=10,
        latent_size=7,
        num_experts=6,
        top_k=3,
        score_function="sigmoid",
        score_correction_bias=True,
        routed_scaling_factor=2.5,
        activation="relu2",
        gated=False,
        num_shared_experts=2,
    )
    parameters = {
        "router.weight": block.gate.weight,
        "router.score_correction_bias": block.gate.e_score_correction_bias,
        "latent_in.weight": block.fc1_latent_proj.weight.T,
        "latent_out.weight": block.fc2_latent_proj.weight.T,
        "experts.up_proj": block.experts.up_proj.transpose(1, 2),
        "experts.down_proj": block.experts.down_proj.transpose(1, 2),
        "shared_experts.up_proj": block.shared_experts.up_proj.weight.T,
        "shared_experts.down_proj": block.shared_experts.down_proj.weight.T,
    }
    return block, config, parameters
