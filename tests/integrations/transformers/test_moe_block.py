"""Models of transformers with replaced blocks: the values of their families' code, on one process and on ranks."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import maxmoe
from maxmoe import StatsAccumulator, optim, parallelize, record_routing, replay_routing
from maxmoe.integrations.transformers import TransformersMoE, replace_moe_blocks
from maxmoe.parallel import token_sharding
from maxmoe.quantization import dequantize_experts
from maxmoe.sharding import Mesh
from support.memory import saved_for_backward
from support.moved_experts import moving_experts
from support.operator_calls import assert_near
from support.replaced_models import (
    IDS,
    PRESETS,
    TOLERANCE,
    assert_same,
    assert_same_gradients,
    enable_checkpointing,
    padding,
    replaced,
    small_model,
    step,
    summed_step,
)
from support.run_ranks import fake_rank, run_cases
from support.small_models import SAME_LAYERS, WithoutFloat32, blocks_of, import_models

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT


def layers_of(model: nn.Module) -> list[TransformersMoE]:
    return [module for module in model.modules() if isinstance(module, TransformersMoE)]


@pytest.mark.parametrize("family", [*PRESETS, *SAME_LAYERS])
def test_equals_the_code_of_the_family(family: str) -> None:
    """Without padding, and with padding on both sides: router logits and balance loss are among the values."""
    eager, ours = small_model(family), replaced(family)
    both_sides = torch.cat([padding(1, "left"), padding(3, "right")[1:]])
    for ids, mask in ((IDS[:1], None), (IDS, both_sides)):
        with WithoutFloat32():
            expected = step(eager, ids, mask, output_router_logits=True)
            got = step(ours, ids, mask, output_router_logits=True)
        has_loss = hasattr(import_models(family)[0], "load_balancing_loss_func")
        assert ("aux_loss" in expected) == (has_loss and not eager.config.is_encoder_decoder)
        assert_same(got, expected, mask, 1e-12)
    assert any(issubclass(kind, TransformersMoE) for kind in read_properties(ours))  # none of them raises


def read_properties(model: nn.Module) -> set[type[nn.Module]]:
    """Read the properties of this package's modules, as `inspect.getmembers` does; return the types of the modules."""
    kinds = {
        kind for module in model.modules() for kind in type(module).__mro__ if kind.__module__.startswith("maxmoe.")
    }
    for module in model.modules():
        for kind in kinds.intersection(type(module).__mro__):
            for name in [name for name, value in vars(kind).items() if isinstance(value, property)]:
                getattr(module, name)
    return kinds


# Models beside the plain ones: a family, a function that makes the family's model and ours, and the side of the padding

Pair = tuple[Any, Any]


def recomputed(use_reentrant: bool) -> Callable[[str, Path], Pair]:
    """The backward recomputes the layers outside of the forward of the model."""

    def models(family: str, _folder: Path) -> Pair:
        ours = replaced(family)
        enable_checkpointing(ours, use_reentrant=use_reentrant)
        return small_model(family), ours

    return models


def with_a_dense_layer(family: str, _folder: Path) -> Pair:
    model = small_model(family, first_k_dense_replace=1)
    ours = copy.deepcopy(model)
    assert [block.path for block in replace_moe_blocks(ours)] == ["model.layers.1.mlp"]
    return model, ours


def copied(family: str, _folder: Path) -> Pair:
    return small_model(family), copy.deepcopy(replaced(family))


def pickled(family: str, folder: Path) -> Pair:
    torch.save(replaced(family), folder / "model.pt")
    return small_model(family), torch.load(folder / "model.pt", weights_only=False)


def adapted(family: str, folder: Path) -> Pair:
    """Each model reads the adapters that the other one has saved; the files have the same tensors."""
    config = LoraConfig(
        r=2,
        target_parameters=[
            "experts.up_proj" if family == "nemotron_h" else "experts.gate_up_proj",
            "experts.down_proj",
            *(["gate.weight"] if family == "mixtral" else []),
        ],
        target_modules={"qwen2_moe": ["q_proj", "shared_expert.up_proj"], "nemotron_h": []}.get(family, ["o_proj"]),
        init_lora_weights=False,
    )
    first = get_peft_model(replaced(family), config)
    for name, parameter in first.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1)
    first.save_pretrained(folder / "ours")
    eager = PeftModel.from_pretrained(small_model(family), folder / "ours", is_trainable=True)
    eager.save_pretrained(folder / "eager")
    ours = PeftModel.from_pretrained(replaced(family), folder / "eager", is_trainable=True)
    written, theirs = (load_file(folder / name / "adapter_model.safetensors") for name in ("ours", "eager"))
    assert written.keys() == theirs.keys() and all(torch.equal(written[name], each) for name, each in theirs.items())
    return eager, ours


def quantized(family: str, _folder: Path) -> Pair:
    """The family's code has the dequantized weights."""
    eager, ours = small_model(family), replaced(family)
    eager.set_experts_implementation("maxmoe")
    for model in (eager, ours):
        for block in blocks_of(model).values():
            block.experts.requires_grad_(False)
        maxmoe.quantize_experts(model, "mxfp4")
    dequantize_experts(eager)
    eager.set_experts_implementation("eager")
    return eager, ours


CASES: list[tuple[str, Callable[[str, Path], Pair], str]] = [
    ("mixtral", recomputed(use_reentrant=False), "left"),
    ("mixtral", recomputed(use_reentrant=True), "right"),
    ("nemotron_h", recomputed(use_reentrant=True), "left"),  # whose decoder layers are blocks
    ("llama4", recomputed(use_reentrant=False), "right"),  # whose block returns a tuple
    ("llama4", recomputed(use_reentrant=True), "left"),
    ("glm4_moe", with_a_dense_layer, "right"),
    ("deepseek_v3", copied, "left"),
    ("deepseek_v3", pickled, "right"),
    ("mixtral", adapted, "left"),  # also of the router
    ("qwen2_moe", adapted, "right"),  # also of a shared expert
    ("nemotron_h", adapted, "left"),  # without a gate
    ("gpt_oss", adapted, "right"),  # transposed matrices
    ("llama4", adapted, "left"),  # experts without an interface
    ("qwen3_moe", quantized, "left"),
    ("gpt_oss", quantized, "right"),
]


@pytest.mark.parametrize(
    ("family", "models", "side"),
    CASES,
    ids=[f"{case[0]}-{case[1].__qualname__.split('.')[0]}-{case[2]}" for case in CASES],
)
def test_equals_the_code_of_the_family_also(
    family: str, models: Callable[[str, Path], Pair], side: str, tmp_path: Path
) -> None:
    eager, ours = models(family, tmp_path)
    mask, accumulator = padding(3, side), StatsAccumulator(ours)
    expected, got = step(eager, IDS, mask), step(ours, IDS, mask)
    assert any("lora_" in name for name in expected) == (models is adapted)
    assert_same(got, expected, mask)
    top_k = layers_of(ours)[0].config.top_k
    for stats in accumulator.update().layers.values():
        assert stats.tokens_per_expert.sum() == top_k * mask.sum()  # without padding and without recomputations


@pytest.mark.parametrize("preset", ["mixtral", "deepseek_v3", "llama4", "switch_transformers"])
def test_recorded_routing_is_replayed(preset: str) -> None:
    model, mask = replaced(preset), padding(3, "left")
    with record_routing(model) as record:
        expected = step(model, IDS, mask)
    with replay_routing(model, record):
        assert_same(step(model, IDS, mask), expected, mask, 1e-12)
    for (ids,) in record.calls.values():
        ids[:, 2:] = -1  # as if a server had not reported them
    with replay_routing(model, record, missing="natural"):
        assert_same(step(model, IDS, mask), expected, mask, 1e-12)


# Losses, statistics and memory


@pytest.mark.parametrize("num_layers", [1, 3])
def test_factor_between_both_balance_losses(num_layers: int) -> None:
    """maxmoe sums the loss over the layers; transformers pools the tokens of all. By default there is neither."""
    theirs = replaced("mixtral", num_hidden_layers=num_layers)
    training = {"load_balance_loss_weight": 0.5, "load_balance_scope": "batch"}
    ours = replaced("mixtral", training, num_hidden_layers=num_layers)
    mask, top_k = padding(3, "right"), 2
    without, accumulator = StatsAccumulator(theirs), StatsAccumulator(ours)
    logits = step(theirs, IDS, mask, output_router_logits=True)["router_logits"]
    step(ours, IDS, mask)
    each = [load_balancing_loss_func((layer.flatten(0, 1),), 6, top_k, mask) for layer in logits]
    torch.testing.assert_close(accumulator.update().aux_loss, 0.5 / top_k * sum(each).double(), rtol=1e-5, atol=0)
    assert theirs.config.router_aux_loss_coef > 0 and without.update().aux_loss == 0


@pytest.mark.parametrize("preset", ["deepseek_v3", "minimax_m2", "longcat_flash", "ernie4_5_moe"])
def test_correction_biases_move_and_are_saved(preset: str) -> None:
    model = replaced(preset, training={"correction_bias_update_rate": 0.125})
    name = next(name for name in model.state_dict() if name.endswith("e_score_correction_bias"))
    before, accumulator = model.state_dict()[name].clone(), StatsAccumulator(model)
    step(model, IDS)
    counts = next(iter(accumulator.update().layers.values())).tokens_per_expert
    expected = before + 0.125 * (counts.double().mean() - counts).sign()
    torch.testing.assert_close(model.state_dict()[name], expected.to(before.dtype))


def test_tokens_that_a_router_drops_are_counted() -> None:
    model = replaced("switch_transformers")
    layers, one_hot = layers_of(model), list[Tensor]()
    for layer in layers:
        layer.part("router").register_forward_hook(lambda _router, _inputs, outputs: one_hot.append(outputs[0]))
    accumulator = StatsAccumulator(model)
    step(model, IDS)
    stats = list(accumulator.update().layers.values())
    assert len(stats) == 2 and layers[0].declaration.needs_whole_sequences
    for each, kept in zip(stats, one_hot, strict=True):
        assert torch.equal(each.tokens_per_expert, kept.sum((0, 1)))
        assert each.dropped == IDS.numel() - kept.sum() > 0


def test_recomputed_experts_have_the_same_gradients() -> None:
    model = replaced("mixtral")
    with saved_for_backward() as saved:
        expected = step(model, IDS)
    maxmoe.set_recompute(model, ("experts", "dispatch"))
    with saved_for_backward() as fewer:
        got = step(model, IDS)
    # Gate and up, of width 10, of the 2 experts of each token in 2 layers.
    assert sum(each.numel() for each in saved) - sum(each.numel() for each in fewer) == 2 * 2 * 20 * IDS.numel()
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def test_muon_takes_gate_and_up_as_two_matrices() -> None:
    for preset, layout in (("mixtral", "concatenated"), ("gpt_oss", "interleaved")):
        groups = optim.parameter_groups(replaced(preset))
        assert layout in str(groups), groups


# Ranks against one process: losses with the balance loss, all gradients and statistics, with padding

RING, RAGGED, LENT = (("ep-as-dp", name) for name in ("ring_of_experts", "ragged_all_to_all", "least_loaded"))
EXPERT, TENSOR, FSDP = {"expert": 2}, {"tensor": 2}, {"fsdp": 2}
ON_RANKS: list[tuple[str, dict[str, int], str, Any]] = [
    ("mixtral", EXPERT, *RING),
    ("mixtral", TENSOR, "default", "auto"),
    ("qwen2_moe", EXPERT, *RAGGED),
    ("deepseek_v3", EXPERT, *LENT),
    ("deepseek_v3", FSDP, "default", "auto"),
    ("nemotron_h", EXPERT, "ep-tp", "auto"),  # a latent size
    ("gpt_oss", EXPERT, *RAGGED),  # biases
    ("gpt_oss", TENSOR, "default", "auto"),
    ("llama4", EXPERT, *LENT),  # experts without an interface
    ("llama4", FSDP, "default", "auto"),
    ("dbrx", EXPERT, *LENT),  # all experts in one matrix
    ("dbrx", EXPERT, "ep-tp", "auto"),
    ("inkling", EXPERT, *RAGGED),  # scored shared experts
    ("inkling", TENSOR, "default", "auto"),
    ("muse_spark", EXPERT, "ep-tp", "auto"),  # a norm inside of the experts
    ("muse_spark", FSDP, "default", "auto"),
    ("step3p7", EXPERT, *RING),
    ("zaya", EXPERT, *RAGGED),  # a state from layer to layer
    ("zaya", TENSOR, "default", "auto"),
    ("axk1", FSDP, "default", "auto"),  # a norm after the sum
    ("cohere2_moe", EXPERT, *RING),
    ("ernie4_5_moe", TENSOR, "default", "auto"),
    # Experts that cannot be sharded are replicated: unused matrices after the experts, two modules, or no stack.
    ("longcat_flash", EXPERT, "ep-as-dp", "auto"),
    ("jetmoe", FSDP, "default", "auto"),
    ("switch_transformers", EXPERT, "ep-as-dp", "auto"),
    ("switch_transformers", FSDP, "default", "auto"),
]
ON_FOUR_RANKS = [("mixtral", FSDP | EXPERT, *RING), ("qwen3_moe", FSDP | EXPERT, *RAGGED)]
IS_REPLICATED = {"longcat_flash", "jetmoe", "switch_transformers"}
TO_FIRST_EXPERTS = {("dbrx", "least_loaded"), ("llama4", "least_loaded")}  # of one rank: experts must be lent
import_models(*{family for family, *_ in [*ON_RANKS, *ON_FOUR_RANKS]})
TOKENS = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(4, 6, dtype=torch.int64)
MASK[0, :2], MASK[3, 3:] = 0, 0


def model_of_ranks(family: str, dispatch: str) -> Any:
    training = {} if family in IS_REPLICATED else {"load_balance_loss_weight": 0.5, "load_balance_scope": "batch"}
    built = replaced(family, training, num_hidden_layers=2 if family == "zaya" else 1)
    if (family, dispatch) in TO_FIRST_EXPERTS:
        for layer in layers_of(built):
            for parameter in layer.router.parameters():
                parameter.data.zero_()
    return built


def step_of_part(model: Any, part: Any = ...) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the tokens per expert of each layer."""
    accumulator = StatsAccumulator(model)
    loss = summed_step(model, TOKENS[part], MASK[part])
    return loss, {path: each.tokens_per_expert for path, each in accumulator.update().layers.items()}


@pytest.mark.filterwarnings("ignore:the rules shard")
@pytest.mark.filterwarnings("ignore:.* of the parameters are whole")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # router of Switch
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPSwitchTransformersBlock. returned a view")
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [(2, ON_RANKS), pytest.param(4, ON_FOUR_RANKS, marks=pytest.mark.slow)],
    ids=["two ranks", "four ranks"],
)
def test_ranks_equal_one_process(num_ranks: int, cases: list[tuple[str, dict[str, int], str, Any]]) -> None:
    wholes = {(family, dispatch): model_of_ranks(family, dispatch) for family, *_, dispatch in cases}
    expected = {key: step_of_part(whole) for key, whole in wholes.items()}

    def check(family: str, sizes: dict[str, int], rules: str, dispatch: Any) -> None:
        mesh = Mesh(sizes)
        ours = parallelize(model_of_ranks(family, dispatch), mesh, rules, dispatch=dispatch, allow_unused=True)
        sharding = token_sharding(mesh, rules)
        with moving_experts(expected=True) if (family, dispatch) in TO_FIRST_EXPERTS else torch.enable_grad():
            loss, counts = step_of_part(ours, sharding.slices(TOKENS.shape))
        if any(sharding.spec):
            dist.all_reduce(loss)
        relative = 1e-12 if family == "dbrx" else TOLERANCE  # all of DBRX is in float64
        assert_near(loss, expected[family, dispatch][0], relative, "loss")
        assert all(torch.equal(each, expected[family, dispatch][1][path]) for path, each in counts.items())
        assert_same_gradients(ours, wholes[family, dispatch], relative)

    run_cases(check, num_ranks, cases)


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    """Also for experts in one matrix whose number of rows is divisible by the ranks."""
    built = small_model("dbrx", ffn_config={"moe_num_experts": 5})
    replace_moe_blocks(built)
    message = r"num_experts \(5\) must be divisible by the axes \('expert',\)"
    with fake_rank(0, 2), pytest.raises(ValueError, match=message):
        parallelize(built, Mesh({"expert": 2}), "ep-as-dp", dispatch="ring_of_experts", allow_unused=True)
