"""prune_experts, merge_experts and duplicate_experts: unchanged outputs, and a layer that fits its config."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import maxmoe
from maxmoe import MoE, MoEFeedForward, ZeroComputation
from maxmoe.convert.surgery import duplicate_experts, merge_experts, prune_experts
from maxmoe.nn import Selection, load_balance_loss
from support.moe_layers import DEEPSEEK, EVERYTHING, GPT_OSS, LLAMA4, assert_meets_specification, make, tokens

SCORES = {
    "softmax": {},
    "softmax_of_all": {"normalization": "none"},
    "sigmoid": {"score_function": "sigmoid", "normalization": "none", "routed_scaling_factor": 2.5},
    "sigmoid_sum": {"score_function": "sigmoid", **EVERYTHING},
    "gpt_oss": GPT_OSS,
    "dense": {"implementation": "dense", "load_balance_loss_weight": 0.1},
    "groups": {**DEEPSEEK, "router": Selection(group_score="max"), "router_z_loss_weight": 0.0},
    "latent": {"latent_size": 4, "score_function": "sigmoid"},
    "balance": {"load_balance_loss_weight": 0.1, "score_function": "sqrtsoftplus"},
}
BESIDE = {"zero_computation": ZeroComputation(zero=1, copy=2, constant=1)}
each_score = pytest.mark.parametrize("options", SCORES.values(), ids=SCORES)


def close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-12 * other.abs().max())


def without_tokens(layer: MoE, x: Tensor) -> list[int]:
    idle = (layer(x).stats.tokens_per_expert == 0).nonzero().flatten().tolist()
    assert idle
    return idle


@each_score
def test_experts_without_tokens_can_be_pruned(options: dict[str, Any]) -> None:
    layer = make(**{"num_experts": 18, "top_k": 2, **options, "num_groups": 1, "top_k_groups": 1})
    x = tokens(layer, 4)
    before, idle = layer(x).hidden_states, without_tokens(layer, x)
    names = [name for name, _ in layer.named_parameters()]
    prune_experts(layer, idle)
    assert layer.config.num_experts == 18 - len(idle) == layer.experts.up_proj.shape[0] == layer.router.weight.shape[0]
    assert [name for name, _ in layer.named_parameters()] == names
    is_softmax_of_all = options == SCORES["softmax_of_all"]
    assert close(layer(x).hidden_states, before) != is_softmax_of_all
    assert_meets_specification(layer, x)


def test_the_others_keep_their_order() -> None:
    layer = make(**EVERYTHING)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    prune_experts(layer, torch.tensor([4, 0]))
    for name, value in layer.state_dict().items():
        rows = before[name] if name.startswith("shared_experts") else before[name][[1, 2, 3, 5]]
        assert torch.equal(value, rows), name


@each_score
@pytest.mark.parametrize("copies", [2, 3])
def test_copies_of_all_experts_with_as_many_times_top_k(copies: int, options: dict[str, Any]) -> None:
    """Outputs and balance loss are the same; merging the copies restores the layer."""
    layer = make(**options)
    x, whole = tokens(layer), copy.deepcopy(layer)
    duplicate_experts(layer, [*range(6)] * (copies - 1), top_k=3 * copies)
    assert (layer.config.num_experts, layer.config.top_k) == (6 * copies, 3 * copies)
    assert close(layer(x).hidden_states, whole(x).hidden_states)
    assert close(layer(x).aux_loss, whole(x).aux_loss)
    assert_meets_specification(layer, x)
    merge_experts(layer, torch.arange(6 * copies).view(6, copies), top_k=3)
    assert layer.config == whole.config
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-15, atol=0)


def test_copies_come_after_their_originals() -> None:
    layer = make(**EVERYTHING)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    duplicate_experts(layer, [5, 2, 2])
    for name, value in layer.state_dict().items():
        rows = before[name] if name.startswith("shared_experts") else before[name][[0, 1, 2, 2, 2, 3, 4, 5, 5]]
        assert torch.equal(value, rows), name
    assert_meets_specification(layer, tokens(layer))


def test_with_one_expert_per_token_a_copy_takes_over_where_noise_says_so() -> None:
    """The copy has the output of the original, so that outputs change by the noise only."""
    layer = make(top_k=1, score_function="sigmoid", normalization="none")
    x, whole = tokens(layer, 1, 2000), copy.deepcopy(layer)
    duplicate_experts(layer, range(6), noise=1e-6)
    counts = layer(x).stats.tokens_per_expert.view(6, 2)
    assert (counts.sum(1) - whole(x).stats.tokens_per_expert).abs().max() <= 1
    assert (counts > 0).all()
    torch.testing.assert_close(layer(x).hidden_states, whole(x).hidden_states, rtol=1e-4, atol=1e-4)


def test_noise_is_on_the_copies() -> None:
    layer = make(hidden_size=64, intermediate_size=64, expert_bias=True, router_bias=True)
    before = copy.deepcopy(layer)
    duplicate_experts(layer, np.array([1, 4]), noise=0.1)
    kept, copies, originals = [0, 1, 3, 4, 5, 7], [2, 6], [1, 4]
    for name, value in layer.named_parameters():
        old = before.get_parameter(name)
        assert torch.equal(value[kept], old), name
        for new, original in zip(copies, originals, strict=True):
            if name.endswith("bias"):
                assert torch.equal(value[new], old[original]), name
                continue
            noise = (value[new] - old[original]).std() / old[original].std()
            assert noise.item() == pytest.approx(0.1, rel=0.3 if value.dim() == 2 else 0.05), name


@pytest.mark.parametrize("normalization", ["sum", "none"])
def test_experts_that_compute_nothing_stay(normalization: str) -> None:
    """Their rows of the router come after the rows of other experts, and ids do not name them."""
    options: dict[str, Any] = {
        "score_function": "sigmoid",
        "normalization": normalization,
        "score_correction_bias": True,
    }
    layer = make(**{**BESIDE, **options, "num_experts": 16})
    accumulator = maxmoe.StatsAccumulator(layer)
    x, rows = tokens(layer, 3), layer.router.weight[16:].clone()
    before, counts = layer(x).hidden_states, layer(x).stats.tokens_per_expert
    prune_experts(layer, (counts[:16] == 0).nonzero().flatten())
    assert close(layer(x).hidden_states, before) and layer.config.zero_computation.copy == 2
    duplicate_experts(layer, [0])
    merge_experts(layer, [[0, 1], [2, 3]])
    assert torch.equal(layer.router.weight[layer.config.num_experts :], rows)
    assert_meets_specification(layer, x)
    layer(x).hidden_states.sum().backward()
    assert len(accumulator.update().layers["moe"].tokens_per_expert) == layer.config.num_experts + 4
    with pytest.raises(ValueError, match=r"experts must be integers in \[0, num_experts \(\d\)\), got 12"):
        prune_experts(layer, [12])


def test_merged_experts_are_means() -> None:
    layer = make(**EVERYTHING)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    merge_experts(layer, [[4, 1], [5, 3]])
    for name, value in layer.state_dict().items():
        old = before[name]
        if not name.startswith("shared_experts"):
            old = torch.stack([old[0], (old[1] + old[4]) / 2, old[2], (old[3] + old[5]) / 2])
        torch.testing.assert_close(value, old, rtol=1e-14, atol=0)
    assert_meets_specification(layer, tokens(layer))


def test_groups_of_the_router_keep_one_size() -> None:
    layer = make(**DEEPSEEK)  # three groups of two experts
    x = tokens(layer)
    duplicate_experts(layer, [0, 3, 5])
    assert layer.config.num_groups == 3
    assert_meets_specification(layer, x)
    prune_experts(layer, [1, 4, 7])
    assert_meets_specification(layer, x)
    with pytest.raises(ValueError, match=r"moe: the 3 groups of the router must keep one size, got \[1, 2, 2\]"):
        prune_experts(layer, [0])
    with pytest.raises(ValueError, match=r"moe: experts must be merged within a group .*, got \(1, 2\) of \[0, 1\]"):
        merge_experts(layer, [[1, 2]])


def test_a_model_has_layers_by_path() -> None:
    config = make().config
    model = nn.ModuleDict({"one": MoE(config), "two": nn.Sequential(MoEFeedForward(config))})
    prune_experts(model, {"two.0": [1, 2]})
    duplicate_experts(model, [0])
    assert [model["one"].config.num_experts, model["two"][0].config.num_experts] == [7, 5]
    with pytest.raises(ValueError, match=r"ModuleDict has no MoE layer 'two'; .*'two.0'"):
        prune_experts(model, {"two": [1]})
    plain = nn.Sequential(MoE(config))
    compiled: Any = torch.compile(plain, backend="aot_eager")
    prune_experts(compiled, {"0": [1]})  # the paths of the statistics
    assert plain[0].config.num_experts == 5
    with pytest.raises(ValueError, match="Linear must have layers of type MoE, got none"):
        prune_experts(nn.Linear(2, 2), [1])


def test_statistics_go_on() -> None:
    layer = make()
    accumulator = maxmoe.StatsAccumulator(layer)
    x = tokens(layer)
    for num_experts in (6, 4):
        layer(x).hidden_states.sum().backward()
        assert accumulator.update().layers["moe"].tokens_per_expert.shape == (num_experts,)
        if num_experts == 6:
            prune_experts(layer, [1, 2])


@pytest.mark.parametrize("format", ["mxfp4", "int4", "fp8_block"])
def test_quantized_experts(format: str) -> None:
    """Codes and scales are selected, not requantized; surgery that needs other values is refused."""
    layer = make(torch.float32, hidden_size=48, intermediate_size=40, num_experts=16).requires_grad_(False)
    maxmoe.quantize_experts(layer, format)
    x = tokens(layer, 3)
    before, idle = layer(x).hidden_states, without_tokens(layer, x)
    prune_experts(layer, idle)
    torch.testing.assert_close(layer(x).hidden_states, before, rtol=1e-6, atol=1e-6)
    num_experts = layer.config.num_experts
    duplicate_experts(layer, range(num_experts), top_k=6)
    torch.testing.assert_close(layer(x).hidden_states, before, rtol=1e-5, atol=1e-5)
    message = "moe.experts.gate_proj must be an ordinary tensor to be averaged or to get noise"
    for operation in (lambda: merge_experts(layer, [[0, 1]]), lambda: duplicate_experts(layer, [0], noise=0.1)):
        with pytest.raises(ValueError, match=message):
            operation()


def test_what_replaces_parts_of_a_layer_stays() -> None:
    """Custom activation and balance loss, and the counts of the step."""

    def cosine(gate: Tensor | None, up: Tensor) -> Tensor:
        return up.cos() if gate is None else gate.cos() * up

    def twice(*arguments: Any, **options: Any) -> Tensor:
        return 2 * load_balance_loss(*arguments, **options)

    config = make(num_experts=16, load_balance_loss_weight=0.1).config
    layer = MoE(config, activation=cosine, balance_loss=twice, dtype=torch.float64)
    x = tokens(layer, 3)
    before = layer(x).hidden_states
    prune_experts(layer, without_tokens(layer, x))
    other = MoE(layer.config, activation=cosine, balance_loss=twice, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    assert close(layer(x).hidden_states, before)
    assert torch.equal(layer(x).hidden_states, other(x).hidden_states)
    assert torch.equal(layer(x).aux_loss, other(x).aux_loss)


def test_the_balance_over_a_step_goes_on() -> None:
    layer = make(load_balance_loss_weight=0.1, load_balance_scope="step")
    accumulator = maxmoe.StatsAccumulator(layer)
    prune_experts(layer, [0, 5])
    for _ in range(2):
        (hidden_states, aux_loss, _), x = layer(tokens(layer)), tokens(layer)
        (hidden_states.sum() + aux_loss).backward()
        (layer(x).hidden_states.sum() + layer(x).aux_loss).backward()
        assert accumulator.update().layers["moe"].tokens_per_expert.shape == (4,)


def test_layers_with_weights_on_the_input() -> None:
    layer = make(**{**LLAMA4, "num_experts": 16})
    x = tokens(layer, 2)
    before = layer(x).hidden_states
    prune_experts(layer, without_tokens(layer, x))
    assert close(layer(x).hidden_states, before)
