"""Zero, copy and constant experts: their values against the specification, and their cost."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig, ZeroComputation
from maxmoe.nn import RoutingRecord, TopK, ZeroComputationExperts
from maxmoe.ops import RaggedPlan
from support.moe_layers import (
    COMPUTE,
    LONGCAT_FLASH,
    SIZES,
    Options,
    assert_meets_specification,
    each_compute,
    make,
    outcome,
    tokens,
)
from support.operator_calls import assert_same, saved_for_backward
from support.operator_checks import compile_whole

KINDS = [
    ZeroComputation(zero=zero, copy=copy, constant=constant)
    for zero, copy, constant in product((0, 2), (0, 3), (0, 2))
    if zero + copy + constant
]
each_kind = pytest.mark.parametrize("kinds", KINDS, ids=str)


def replayed(layer: MoE, x: Tensor, experts: Tensor) -> maxmoe.MoEOutput:
    with maxmoe.replay_routing(layer, RoutingRecord({"": [experts]})):
        output: maxmoe.MoEOutput = layer(x)
    return output


def planned_rows(layer: MoE) -> list[RaggedPlan]:
    """Return a list that gets the plan of every call of the experts."""
    plans: list[RaggedPlan] = []
    layer.experts.register_forward_pre_hook(lambda _, arguments: plans.append(arguments[2]))
    return plans


# Values


@pytest.mark.sampled(13)
@each_kind
@each_compute
def test_meets_the_specification(path: str, kinds: ZeroComputation, compute: Options) -> None:
    options = {"score_function": "sigmoid", "score_correction_bias": True, "num_shared_experts": 1}
    losses = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
    layer = make(**options, **losses, zero_computation=kinds, **compute)
    assert_meets_specification(layer)


@each_compute
def test_weights_on_the_input_of_copies(compute: Options) -> None:
    """copy(w x) = w copy(x)."""
    layer = make(zero_computation=ZeroComputation(copy=4), apply_weights_to="input", **compute)
    assert_meets_specification(layer, tokens(layer, 2, 9))


def test_by_hand() -> None:
    kinds = ZeroComputation(zero=1, copy=1, constant=1)
    layer = make(num_experts=2, top_k=1, normalization="none", zero_computation=kinds)
    assert layer.zero_computation_experts is not None
    vectors, mixing = layer.zero_computation_experts.vectors, layer.zero_computation_experts.mixing
    assert vectors is not None and mixing is not None
    x = tokens(layer, 5)
    weights = torch.softmax(x @ layer.router.weight.mT, 1)
    zero, copy, constant = (replayed(layer, x, torch.full((5, 1), expert)).hidden_states for expert in (2, 3, 4))
    assert torch.equal(zero, torch.zeros_like(x))
    torch.testing.assert_close(copy, weights[:, 3:4] * x)
    share = 1 / (1 + torch.exp(x @ (mixing[0, 1] - mixing[0, 0])))
    expected = weights[:, 4:5] * (share[:, None] * x + (1 - share)[:, None] * vectors[0])
    torch.testing.assert_close(constant, expected)


def test_more_experts_per_token_than_compute() -> None:
    layer = make(num_experts=2, zero_computation=ZeroComputation(zero=2, copy=2), top_k=5)
    assert_meets_specification(layer, tokens(layer, 2, 6))


def test_a_token_may_have_no_expert_that_computes() -> None:
    layer = make(zero_computation=ZeroComputation(copy=4), top_k=2, normalization="sum")
    x = tokens(layer, 7).requires_grad_()
    plans = planned_rows(layer)
    output = replayed(layer, x, torch.tensor([[6, 9]]).expand(7, 2))
    torch.testing.assert_close(output.hidden_states, x)  # the weights add up to one
    assert plans[0].slots.numel() == 0 and output.stats.dropped == 0
    output.hidden_states.sum().backward()
    assert layer.experts.up_proj.grad is not None and not layer.experts.up_proj.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    layer = make(dtype, **LONGCAT_FLASH)
    module = layer.zero_computation_experts
    assert module is not None
    x, routing = tokens(layer, 40), layer.router(tokens(layer, 40))
    got = module(x, routing.top_k)
    wide = module.double()(x.double(), TopK(routing.weights.double(), routing.experts))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wide, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)


def test_bits_of_a_token_are_those_of_the_token_alone() -> None:
    module = make(torch.float32, **LONGCAT_FLASH, hidden_size=19).zero_computation_experts
    assert module is not None
    x, weights = torch.randn(70, 19), torch.rand(70, 6)
    experts = torch.stack([torch.randperm(12)[:6] for _ in range(70)])
    whole = module(x, TopK(weights, experts))
    for count in range(70):
        assert module(x[:count], TopK(weights[:count], experts[:count])).equal(whole[:count]), count


# Cost


@each_kind
def test_rows_are_the_slots_of_experts_that_compute(path: str, kinds: ZeroComputation) -> None:
    layer = make(zero_computation=kinds)
    plans = planned_rows(layer)
    stats = layer(tokens(layer, 4, 25)).stats
    used = plans[0].rows[plans[0].rows >= 0]
    assert len(used) == stats.tokens_per_expert[:6].sum() < stats.tokens_per_expert.sum() == 300
    assert plans[0].group_sizes.equal(stats.tokens_per_expert[:6])


def test_zero_experts_add_no_operator_and_no_parameter() -> None:
    plain, layer = make(), make(zero_computation=ZeroComputation(zero=3))
    assert layer.zero_computation_experts is None and layer.state_dict().keys() == plain.state_dict().keys()


def test_saves_a_factor_per_token_for_copies() -> None:
    """The only saved tensor besides x, which the layer saves anyway."""
    module = make(torch.bfloat16, zero_computation=ZeroComputation(copy=3), top_k=2).zero_computation_experts
    assert module is not None
    x = torch.randn(30, 7, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(30, 2, requires_grad=True)
    with saved_for_backward() as saved:
        module(x, TopK(weights, torch.randint(9, (30, 2))))
    kept = {tensor.data_ptr(): tensor for tensor in saved if tensor.data_ptr() != x.data_ptr()}
    assert sum(tensor.nbytes for tensor in kept.values()) <= 30 * (4 + 2)


# In use


@each_compute
def test_recomputation_and_replay(compute: Options) -> None:
    layer = make(**LONGCAT_FLASH, **compute)
    x = tokens(layer, 3, 8)
    expected = outcome(layer, x)
    assert_same(outcome(layer, x, partial(checkpoint, layer, use_reentrant=False)), expected, 1e-14)
    kept = partial(checkpoint, layer, use_reentrant=False, context_fn=maxmoe.keep_routing)
    assert_same(outcome(layer, x, kept), expected, 1e-14)
    with maxmoe.record_routing(layer) as record:
        layer(x)
    with maxmoe.replay_routing(layer, record):
        assert_same(outcome(layer, x), expected, 1e-14)
    maxmoe.set_recompute(layer, ("dispatch", "experts"))
    assert_same(outcome(layer, x), expected, 1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("compute", [COMPUTE["sparse"], COMPUTE["dense"]], ids=["sparse", "dense"])
def test_compiled_as_one_graph(compute: Options) -> None:
    """By default, test_shared_expert_scores.py alone compiles such experts."""
    layer = make(**LONGCAT_FLASH, **compute)
    x = tokens(layer, 2, 6)
    assert_same(outcome(layer, x, compile_whole(layer, "aot_eager")), outcome(layer, x), 1e-12)


def test_autocast() -> None:
    layer = make(torch.float32, **LONGCAT_FLASH)
    x = tokens(layer, 20)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    torch.testing.assert_close(output.hidden_states.float(), layer(x).hidden_states, rtol=0.1, atol=0.3)


def test_quantized_experts_beside_them() -> None:
    layer = make(torch.float32, **{**LONGCAT_FLASH, "hidden_size": 32, "intermediate_size": 32}).requires_grad_(False)
    maxmoe.quantize_experts(layer, "int8")
    x = tokens(layer, 9)
    copies = replayed(layer, x, torch.tensor([[6, 7, 9]]).expand(9, 3)).hidden_states
    factors = torch.softmax(x @ layer.router.weight.mT, 1)[:, [7, 9]].sum(1, keepdim=True) * 6.0
    torch.testing.assert_close(copies, factors * x)


def test_the_correction_bias_balances_all_experts() -> None:
    torch.manual_seed(0)
    layer = make(zero_computation=ZeroComputation(copy=6), score_correction_bias=True, correction_bias_update_rate=0.02)
    assert layer.router.score_correction_bias is not None
    layer.router.score_correction_bias[6:] = 2.0  # only copies are selected
    x = tokens(layer, 500)
    shares = []
    for _ in range(200):
        counts = layer(x).stats.tokens_per_expert
        shares.append(float(counts[:6].sum() / counts.sum()))
        layer.update_correction_bias(counts)
    assert shares[0] == 0.0 and abs(shares[-1] - 0.5) < 0.05


def test_statistics_count_all_experts() -> None:
    model = torch.nn.Sequential(
        maxmoe.MoEFeedForward(MoEConfig(**SIZES, zero_computation=ZeroComputation(zero=2, copy=1)))
    )
    accumulator = maxmoe.StatsAccumulator(model)
    model(torch.randn(2, 8, 7)).sum().backward()
    counts = accumulator.update().layers["0"].tokens_per_expert
    assert counts.shape == (9,) and counts.sum() == 48


def test_state_dict_and_initialization() -> None:
    layer = MoE(MoEConfig(**SIZES, zero_computation=ZeroComputation(copy=1, constant=40)), device="meta").to_empty(
        device="cpu"
    )
    layer.reset_parameters()
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes["zero_computation_experts.vectors"] == (40, 7)
    assert shapes["zero_computation_experts.mixing"] == (40, 2, 7)
    assert shapes["router.weight"] == (47, 7) and shapes["experts.up_proj"] == (6, 7, 5)
    module = layer.zero_computation_experts
    assert isinstance(module, ZeroComputationExperts) and module.vectors is not None and module.mixing is not None
    assert 0.8 < module.vectors.std() < 1.2 and 0.8 < module.mixing.std() * 7**0.5 < 1.2


# Mistakes


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ({"zero": -1}, {}, "zero must be an int >= 0, got -1"),
        ({"copy": 1.0}, {}, r"copy must be an int >= 0, got 1\.0"),
        ({"constant": True}, {}, "constant must be an int >= 0, got True"),
        (
            {"zero": 2},
            {"top_k": 9},
            r"top_k \(9\) must not exceed num_experts \(6\) \+ ZeroComputation\(zero=2, copy=0, constant=0\)$",
        ),
        ({"copy": 2}, {"num_groups": 2, "top_k_groups": 2}, r"ZeroComputation\(.*\) needs num_groups=1, got 2"),
        ({"constant": 2}, {"apply_weights_to": "input"}, r"constant=2\) needs apply_weights_to='output', got 'input'"),
        ({"copy": 2}, {"buffer_factor": 8.5}, r"buffer_factor \(8\.5\) must not exceed num_experts \(6\) \+ "),
    ],
)
def test_mistakes_in_the_config(counts: Options, options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{**SIZES, **options}, zero_computation=ZeroComputation(**counts))
