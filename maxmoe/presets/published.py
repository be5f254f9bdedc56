"""`MoEConfig` of each published family, with the sizes of its flagship; `overrides` replace fields of the config.

The weights of the balance loss are for `maxmoe.nn.load_balance_loss`, which is 1 if the load is balanced. The loss of
transformers is a sum over the K choices, this one a mean, so the weights here are K times `router_aux_loss_coef`.
transformers takes the mean over the layers, whereas the sum of all `aux_loss` is a sum over the layers: for the same
total with L layers, divide these weights by L. DeepSeek sums over the layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from maxmoe.components import ZeroComputation
from maxmoe.config import MoEConfig
from maxmoe.nn.selection import Selection

Preset: TypeAlias = Callable[..., MoEConfig]
_LATENT = "plain attention with the same number of heads, of size 128, instead of latent attention"
_NORMED_HEADS = "no norms of queries and keys"


@dataclass(frozen=True)
class PublishedModel:
    """A published model.

    Args:
        name: name of the model.
        layer: preset of its Mixture-of-Experts layers.
        sizes: fields of `maxmoe.models.DecoderConfig`. Layers of multi-token prediction do not count.
        differs: differences of a `Decoder` of these sizes from the published model.
    """

    name: str
    layer: Preset
    sizes: Mapping[str, int]
    differs: str = ""


PUBLISHED: dict[str, PublishedModel] = {}  # by the name of the preset of their layers


def _layer_of(
    name: str, layers: int, heads: tuple[int, ...], vocab_size: int, dense: tuple[int, ...] = (), differs: str = ""
) -> Callable[[Preset], Preset]:
    """Decorate the preset of the layers of a published model with the sizes of the model, to plan it as a `Decoder`.

    Heads are the number of query heads, of key-value heads if it differs, and the head dim if it is not 128; `dense` is
    the number of dense layers and their width.
    """

    def register(preset: Preset) -> Preset:
        sizes = {"head_dim": 128, "num_layers": layers, "vocab_size": vocab_size}
        sizes |= zip(("num_heads", "num_key_value_heads", "head_dim"), heads, strict=False)
        sizes |= zip(("num_dense_layers", "intermediate_size"), dense, strict=False)
        PUBLISHED[preset.__name__] = PublishedModel(name, preset, sizes, differs)
        return preset

    return register


def _config(
    overrides: dict[str, Any], base: Preset = MoEConfig, sizes: tuple[int, ...] = (), **fields: Any
) -> MoEConfig:
    """Make a config; `sizes` are hidden_size, intermediate_size, num_experts and top_k."""
    names = ("hidden_size", "intermediate_size", "num_experts", "top_k")
    return base(**dict(zip(names, sizes, strict=False)) | fields | overrides)


@_layer_of("Mixtral 8x7B", layers=32, heads=(32, 8), vocab_size=32000)
def mixtral(**overrides: Any) -> MoEConfig:
    """Mixtral 8x7B: softmax over the two selected experts, balance loss over the batch.

    Source: Jiang et al. 2024 (arXiv:2401.04088); config of mistralai/Mixtral-8x7B-v0.1.
    """
    return _config(overrides, sizes=(4096, 14336, 8, 2), load_balance_loss_weight=0.02 * 2, load_balance_scope="batch")


@_layer_of(
    "Qwen2-57B-A14B", layers=28, heads=(28, 4), vocab_size=151936, differs="no biases of queries, keys and values"
)
def qwen2_moe(**overrides: Any) -> MoEConfig:
    """Qwen2-57B-A14B: softmax over all experts, weights not renormalized, and a gated shared expert.

    Source: Yang et al. 2024 (arXiv:2407.10671); config of Qwen/Qwen2-57B-A14B.
    """
    return _config(
        overrides,
        sizes=(3584, 2560, 64, 8),
        normalization="none",
        num_shared_experts=8,
        shared_expert_gate=True,
        load_balance_loss_weight=0.001 * 8,
        load_balance_scope="batch",
    )


@_layer_of("Qwen3-235B-A22B", layers=94, heads=(64, 4), vocab_size=151936, differs=_NORMED_HEADS)
def qwen3_moe(**overrides: Any) -> MoEConfig:
    """Qwen3-235B-A22B: fine-grained experts, no shared expert, balance loss over the global batch.

    Source: Yang et al. 2025 (arXiv:2505.09388); config of Qwen/Qwen3-235B-A22B.
    """
    return _config(
        overrides, sizes=(4096, 1536, 128, 8), load_balance_loss_weight=0.001 * 8, load_balance_scope="batch"
    )


@_layer_of(
    "Qwen3-Next-80B-A3B",
    layers=48,
    heads=(16, 2, 256),
    vocab_size=151936,
    differs="plain attention in all layers instead of linear attention in three of four",
)
def qwen3_next(**overrides: Any) -> MoEConfig:
    """Qwen3-Next-80B-A3B: ten of 512 small experts, and a gated shared expert.

    Source: config of Qwen/Qwen3-Next-80B-A3B-Instruct.
    """
    return _config(
        overrides,
        sizes=(2048, 512, 512, 10),
        num_shared_experts=1,
        shared_expert_gate=True,
        load_balance_loss_weight=0.001 * 10,
        load_balance_scope="batch",
    )


@_layer_of("OLMoE-1B-7B", layers=16, heads=(16,), vocab_size=50304, differs=_NORMED_HEADS)
def olmoe(**overrides: Any) -> MoEConfig:
    """OLMoE-1B-7B: softmax over all experts, weights not renormalized, with balance loss and z-loss.

    Its training code defines the balance loss as `maxmoe.nn.load_balance_loss`, so the weight is the published one.

    Source: Muennighoff et al. 2024 (arXiv:2409.02060); config of allenai/OLMoE-1B-7B-0924.
    """
    return _config(
        overrides,
        sizes=(2048, 1024, 64, 8),
        normalization="none",
        load_balance_loss_weight=0.01,
        load_balance_scope="batch",
        router_z_loss_weight=0.001,
    )


@_layer_of("DeepSeek-V2", layers=60, heads=(128,), vocab_size=102400, dense=(1, 12288), differs=_LATENT)
def deepseek_v2(**overrides: Any) -> MoEConfig:
    """DeepSeek-V2: softmax over all experts, weights not renormalized, three of eight groups, two shared experts.

    Source: DeepSeek-AI 2024 (arXiv:2405.04434), the expert-level loss in section 3.1.2; config of
    deepseek-ai/DeepSeek-V2.
    """
    return _config(
        overrides,
        sizes=(5120, 1536, 160, 6),
        num_groups=8,
        top_k_groups=3,
        router=Selection(group_score="max"),
        normalization="none",
        routed_scaling_factor=16.0,
        num_shared_experts=2,
        load_balance_loss_weight=0.003,
    )


@_layer_of("DeepSeek-V3", layers=61, heads=(128,), vocab_size=129280, dense=(3, 18432), differs=_LATENT)
def deepseek_v3(**overrides: Any) -> MoEConfig:
    """DeepSeek-V3: sigmoid scores, four of eight groups, and a correction bias for loss-free balancing.

    Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2 for the losses; config of deepseek-ai/DeepSeek-V3.
    """
    return _config(
        overrides,
        sizes=(7168, 2048, 256, 8),
        score_function="sigmoid",
        score_correction_bias=True,
        num_groups=8,
        top_k_groups=4,
        routed_scaling_factor=2.5,
        num_shared_experts=1,
        load_balance_loss_weight=0.0001,
        correction_bias_update_rate=0.001,
    )


@_layer_of("Kimi-K2", layers=61, heads=(64,), vocab_size=163840, dense=(1, 18432), differs=_LATENT)
def kimi_k2(**overrides: Any) -> MoEConfig:
    """Kimi-K2: as `deepseek_v3`, with more experts and no groups; the update rate of the bias is not published.

    Source: Kimi Team 2025 (arXiv:2507.20534); config of moonshotai/Kimi-K2-Instruct, including the loss weight.
    """
    return _config(
        overrides,
        deepseek_v3,
        num_experts=384,
        num_groups=1,
        top_k_groups=1,
        routed_scaling_factor=2.827,
        load_balance_loss_weight=0.001,
    )


@_layer_of(
    "GLM-4.5",
    layers=92,
    heads=(96, 8),
    vocab_size=151552,
    dense=(3, 12288),
    differs="no norms and no biases of queries and keys",
)
def glm4_moe(**overrides: Any) -> MoEConfig:
    """GLM-4.5: as `deepseek_v3`, with fewer and smaller experts and no groups.

    Source: GLM-4.5 Team 2025 (arXiv:2508.06471); config of zai-org/GLM-4.5.
    """
    return _config(
        overrides, deepseek_v3, hidden_size=5120, intermediate_size=1536, num_experts=160, num_groups=1, top_k_groups=1
    )


def longcat_flash(**overrides: Any) -> MoEConfig:
    """LongCat-Flash: one copy expert for two others, so that a token uses 8 of its 12 experts on average.

    The bias is moved by other rules than here, which keep this average, and the weight of the balance loss is not
    published.

    Source: Meituan LongCat Team 2025 (arXiv:2509.01322); config of meituan-longcat/LongCat-Flash-Chat.
    """
    return _config(
        overrides,
        sizes=(6144, 2048, 512, 12),
        zero_computation=ZeroComputation(copy=256),
        score_correction_bias=True,
        normalization="none",
        routed_scaling_factor=6.0,
    )


@_layer_of("MiniMax-M2", layers=62, heads=(48, 8), vocab_size=200064, differs=_NORMED_HEADS)
def minimax_m2(**overrides: Any) -> MoEConfig:
    """MiniMax-M2: sigmoid scores, a correction bias whose update rate is not published, no shared expert.

    Source: config of MiniMaxAI/MiniMax-M2.
    """
    return _config(
        overrides,
        sizes=(3072, 1536, 256, 8),
        score_function="sigmoid",
        score_correction_bias=True,
        load_balance_loss_weight=0.001 * 8,
        load_balance_scope="batch",
    )


def nemotron_h(**overrides: Any) -> MoEConfig:
    """Nemotron 3 Nano: as `deepseek_v3` without groups, experts without gate, and a shared expert twice as wide.

    Larger models of the family have latent experts: `latent_size`.

    Source: NVIDIA 2025, Nemotron 3 Nano; config of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
    """
    return _config(
        overrides,
        deepseek_v3,
        sizes=(2688, 1856, 128, 6),
        num_groups=1,
        top_k_groups=1,
        activation="relu2",
        gated=False,
        num_shared_experts=2,
    )


@_layer_of(
    "gpt-oss-120b",
    layers=36,
    heads=(64, 8, 64),
    vocab_size=201088,
    differs="no biases and sinks of attention, and no sliding windows",
)
def gpt_oss(**overrides: Any) -> MoEConfig:
    """gpt-oss-120b: biases in router and experts, clipped SwiGLU, softmax over the selected logits.

    The weight of the balance loss is not published. This preset has none, because the 0.9 in the config would outweigh
    any training loss.

    Source: OpenAI 2025 (arXiv:2508.10925); config of openai/gpt-oss-120b.
    """
    return _config(
        overrides,
        sizes=(2880, 2880, 128, 4),
        score_function="identity",
        router_bias=True,
        normalization="softmax",
        activation="swigluoai",
        activation_limit=7.0,
        expert_bias=True,
        load_balance_scope="batch",
    )


@_layer_of(
    "Llama 4 Maverick",
    layers=48,
    heads=(40, 8),
    vocab_size=202048,
    dense=(24, 16384),
    differs="the first half of the layers is dense instead of every other layer",
)
def llama4(**overrides: Any) -> MoEConfig:
    """Llama 4 Maverick: one expert per token, with its input scaled by the sigmoid of the logit, and a shared expert.

    Source: config of meta-llama/Llama-4-Maverick-17B-128E.
    """
    return _config(
        overrides,
        sizes=(5120, 8192, 128, 1),
        score_function="sigmoid",
        normalization="none",
        apply_weights_to="input",
        num_shared_experts=1,
        load_balance_loss_weight=0.001,
        load_balance_scope="batch",
    )


@_layer_of("DBRX", layers=40, heads=(48, 8), vocab_size=100352, differs="no clipping of queries, keys and values")
def dbrx(**overrides: Any) -> MoEConfig:
    """DBRX: softmax over all experts, the weights of four of sixteen divided by their sum.

    Source: config of databricks/dbrx-instruct.
    """
    return _config(overrides, sizes=(6144, 10752, 16, 4), load_balance_loss_weight=0.05 * 4, load_balance_scope="batch")


@_layer_of(
    "Granite 3.0 3B-A800M",
    layers=32,
    heads=(24, 8, 64),
    vocab_size=49155,
    differs="no factors of embeddings, attention, residuals and logits",
)
def granitemoe(**overrides: Any) -> MoEConfig:
    """Granite 3.0 3B-A800M: softmax over the eight selected logits of forty.

    Source: config of ibm-granite/granite-3.0-3b-a800m-base.
    """
    return _config(
        overrides,
        sizes=(1536, 512, 40, 8),
        score_function="identity",
        normalization="softmax",
        load_balance_loss_weight=0.001 * 8,
        load_balance_scope="batch",
    )


def jetmoe(**overrides: Any) -> MoEConfig:
    """JetMoE-8B: softmax over the two selected logits. A bias is added to the output, which a `maxmoe.MoE` lacks.

    Attention heads are experts there as well, which are no part of the layer.

    Source: Shen et al. 2024 (arXiv:2404.07413); config of jetmoe/jetmoe-8b.
    """
    return _config(
        overrides,
        sizes=(2048, 5632, 8, 2),
        score_function="identity",
        normalization="softmax",
        load_balance_loss_weight=0.01 * 2,
        load_balance_scope="batch",
    )


def switch_transformers(**overrides: Any) -> MoEConfig:
    """Switch-C: one of 2048 experts without a gate; its weight is the softmax over all, and tokens are dropped.

    An expert takes 64 tokens of a sequence, which `maxmoe.integrations.transformers.replace_moe_blocks` keeps and a
    `maxmoe.MoE` does not: its `capacity_factor` counts in even loads.

    Source: Fedus et al. 2021 (arXiv:2101.03961), sections 2.2 and 5.6; config of google/switch-c-2048.
    """
    return _config(
        overrides,
        sizes=(2080, 6144, 2048, 1),
        normalization="none",
        activation="relu",
        gated=False,
        load_balance_loss_weight=0.001,
        load_balance_scope="sequence",
        router_z_loss_weight=0.001,
    )
