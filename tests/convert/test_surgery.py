"""prune_experts, merge_experts and duplicate_experts: unchanged outputs, and a layer that fits its config."""

import copy
import dataclasses
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import maxmoe
from maxmoe import MoE, MoEFeedForward, ZeroComputation
from maxmoe.convert.surgery import duplicate_experts, merge_experts, prune_experts
from maxmoe.families.deepseek_v4 import HashRouting
from maxmoe.nn import ExpertRunner, LocalDispatcher, LocalExperts, Router, Selection, load_balance_loss
from maxmoe.sharding import Mesh
from support.moe_layers import DEEPSEEK, EVERYTHING, GPT_OSS, LLAMA4, assert_meets_specification, make, tokens
from support.run_ranks import fake_rank

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


def close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-12 * other.abs().max())


def without_tokens(layer: MoE, x: Tensor) -> list[int]:
    idle = (layer(x).stats.tokens_per_expert == 0).nonzero().flatten().tolist()
    assert idle
    return idle


@pytest.mark.parametrize("options", [*SCORES.values(), LLAMA4], ids=[*SCORES, "llama4"])
def test_experts_without_tokens_can_be_pruned(options: dict[str, Any]) -> None:
    layer = make(**{"top_k": 2, **options, "num_experts": 18, "num_groups": 1, "top_k_groups": 1})
    x = tokens(layer, 4)
    before, idle = layer(x).hidden_states, without_tokens(layer, x)
    names = [name for name, _ in layer.named_parameters()]
    prune_experts(layer, idle)
    assert layer.config.num_experts == 18 - len(idle) == layer.experts.up_proj.shape[0] == layer.router.weight.shape[0]
    assert [name for name, _ in layer.named_parameters()] == names
    is_softmax_of_all = options == SCORES["softmax_of_all"]
    assert close(layer(x).hidden_states, before) != is_softmax_of_all
    assert_meets_specification(layer, x)


@pytest.mark.parametrize("options", SCORES.values(), ids=SCORES)
def test_copies_of_all_experts_with_as_many_times_top_k(options: dict[str, Any]) -> None:
    """Outputs and balance loss are the same; merging the copies restores the layer."""
    layer, copies = make(**options), 3
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


@pytest.mark.parametrize("scope", ["batch", "step"])
def test_statistics_and_the_balance_over_a_step_go_on(scope: Any) -> None:
    layer = make(load_balance_loss_weight=0.1, load_balance_scope=scope)
    accumulator = maxmoe.StatsAccumulator(layer)
    for num_experts in (6, 4, 4):
        for _ in range(2):
            hidden_states, aux_loss, _ = layer(tokens(layer))
            (hidden_states.sum() + aux_loss).backward()
        assert accumulator.update().layers["moe"].tokens_per_expert.shape == (num_experts,)
        if num_experts == 6:
            layer.zero_grad()
            prune_experts(layer, [1, 2])


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4", "fp8_block"])
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


# Refusals

ERRORS: list[tuple[Callable[[Any], None], str]] = [
    (lambda model: prune_experts(model, [0], optimizer=[]), "optimizer must be a torch.optim.Optimizer, got list"),  # type: ignore[arg-type]
    (lambda model: prune_experts(model, [0, 1, 2, 3]), "0: top_k (3) must not exceed num_experts (2)"),
    (lambda model: prune_experts(model, [*range(6)]), "0: num_experts must be a positive int, got 0"),
    (lambda model: prune_experts(model, [6]), "0: experts must be integers in [0, num_experts (6)), got 6"),
    (lambda model: prune_experts(model, torch.tensor([0.5])), "0: experts must be integers in [0, num_experts (6))"),
    (lambda model: prune_experts(model, [True]), "0: experts must be integers in [0, num_experts (6)), got True"),
    (lambda model: prune_experts(model, 1), "0: experts must be a sequence, got 1"),  # type: ignore[arg-type]
    (lambda model: merge_experts(model, 3), "0: sets must be a sequence, got 3"),  # type: ignore[arg-type]
    (lambda model: merge_experts(model, [[]]), "0: each set must have at least one expert, got [()]"),
    (lambda model: prune_experts(model, [2, 1, 2]), "0: experts must be named once, got 2 2 times"),
    (lambda model: duplicate_experts(model, [0], top_k=8), "0: top_k (8) must not exceed num_experts (7)"),
    (lambda model: duplicate_experts(model, [0], top_k=0), "top_k must be a positive int, got 0"),
    (lambda model: duplicate_experts(model, [0], noise=-1), "noise must be a finite float >= 0, got -1"),
    (lambda model: prune_experts(model, {"1": [0, 1]}), "1: top_k (3) must not exceed num_experts (2)"),
    (lambda model: merge_experts(model, {"0": [[0, 1]], "1": [[0, 1, 2]]}), "1: top_k (3) must not exceed"),
]


@pytest.mark.parametrize(("operation", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_nothing_changes_if_something_does_not_fit(operation: Callable[[nn.Module], None], message: str) -> None:
    model = nn.Sequential(make(), make(num_experts=4))
    parameters, configs = list(model.parameters()), [layer.config for layer in model]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        operation(model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert [layer.config for layer in model] == configs


def test_other_routers_adapters_and_dispatchers_are_refused() -> None:
    layer = make()
    layer.runner = ExpertRunner(LocalDispatcher(dataclasses.replace(LocalExperts.all_of(layer.config), count=3)))
    with pytest.raises(ValueError, match="moe must have the dispatcher of one process, got LocalDispatcher"):
        prune_experts(layer, [0])
    layer = make()
    layer.router = nn.Sequential(layer.router)
    with pytest.raises(ValueError, match=r"moe.router must be a maxmoe.nn.Router, got Sequential"):
        prune_experts(layer, [0])
    layer.router = type("Other", (Router,), {})(layer.config)
    with pytest.raises(ValueError, match=r"moe.router must be a maxmoe.nn.Router, got Other"):
        prune_experts(layer, [0])
    layer = make()
    layer.experts = nn.Sequential(layer.experts)
    with pytest.raises(ValueError, match=r"moe.experts must be a maxmoe.nn.Experts, got Sequential"):
        prune_experts(layer, [0])
    layer = make(router=HashRouting(num_ids=3))
    with pytest.raises(ValueError, match=r"moe must have a router without a table of experts for ids, got HashRouting"):
        prune_experts(layer, [0])


def test_layers_that_share_experts_are_refused() -> None:
    model = nn.Sequential(make(), make(), make())
    model[1].experts = model[0].experts
    with pytest.raises(ValueError, match="1 must not share its router and experts, got a parameter of 0"):
        prune_experts(model, {"1": [0]})
    prune_experts(model, {"2": [np.int64(0)]})
    assert [layer.config.num_experts for layer in model] == [6, 6, 5]


def test_sharded_layers_are_refused() -> None:
    with fake_rank(0, 1):
        layer = maxmoe.parallelize(make(), Mesh({"expert": -1}), "ep-as-dp")
        sharded = make()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        message = r"surgery needs whole tensors, got moe\..*: call it before parallelize or fully_shard"
        for refused, operation in product((layer, sharded), (prune_experts, duplicate_experts)):
            with pytest.raises(ValueError, match=message):
                operation(refused, [0])
        with pytest.raises(ValueError, match="surgery comes before DistributedDataParallel"):
            prune_experts(DistributedDataParallel(make()), [0])
