"""MoE: the layer against the specification, in every combination of its options."""

from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from maxmoe import MoE, MoEOutput
from maxmoe.config import Normalization, ScoreFunction
from maxmoe.nn import Selection
from support import activations
from support.moe_layers import (
    COMPUTE,
    FAMILIES,
    SIZES,
    Options,
    assert_meets_specification,
    each_compute,
    each_family,
    make,
    tokens,
)
from support.operator_calls import tolerance
from support.pairwise import pairwise
from support.shapes import DTYPES


def assert_gradcheck(layer: MoE, x: Tensor) -> None:
    names, values = zip(*layer.named_parameters(), strict=True)

    def function(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        output: MoEOutput = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return (output.hidden_states, *([output.aux_loss] if output.aux_loss.requires_grad else []))

    x = x.detach().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, *values), fast_mode=True)


OPTIONS: list[list[Options]] = [
    [{"score_function": name} for name in get_args(ScoreFunction)],
    [{"normalization": name} for name in get_args(Normalization)],
    [{}, {"score_correction_bias": True}],
    [{}, {"router_bias": True}],
    [{}, {"num_groups": 3, "top_k_groups": 2}, {"num_groups": 2}, {"num_groups": 6, "top_k_groups": 4}],
    [{}, {"router": Selection(group_score="max")}],
    [{}, {"routed_scaling_factor": 2.5}],
    [{}, {"apply_weights_to": "input"}],
    [
        {"activation": "silu"},
        {"activation": "silu", "gated": False},
        {"activation": "gelu", "activation_limit": 0.5},
        {"activation": "gelu_tanh", "gated": False},
        {"activation": "relu"},
        {"activation": "relu2", "gated": False},
        {"activation": "swigluoai"},
        {"activation": "swigluoai", "activation_limit": 0.75},
        activations.fields(activations.SITU),
        activations.fields(activations.LIMITED_OUTPUT),
    ],
    [{}, {"expert_bias": True}],
    [{}, {"num_shared_experts": 1}, {"num_shared_experts": 2, "shared_expert_gate": True}],
    [
        {},
        {"load_balance_loss_weight": 0.3},
        {"load_balance_loss_weight": 0.3, "load_balance_scope": "batch", "router_z_loss_weight": 0.2},
        {"router_z_loss_weight": 0.2},
    ],
    list(COMPUTE.values()),
    [{"shape": (2, 5)}, {"shape": (11,)}, {"shape": (2, 1, 6)}],
]


def name_of(choices: tuple[Options, ...]) -> str:
    return "-".join(str(value).replace(" ", "") for choice in choices for value in choice.values())


@pytest.mark.parametrize("choices", pairwise(OPTIONS), ids=name_of)
def test_every_pair_of_options(every_path: str, choices: tuple[Options, ...]) -> None:
    options = {name: value for choice in choices for name, value in choice.items()}
    shape = options["shape"]
    layer = make(**{key: value for key, value in options.items() if key != "shape"})
    assert_meets_specification(layer, tokens(layer, *shape), 1e-11)


@pytest.mark.parametrize(("dtype", "compute", "family"), pairwise([DTYPES, [*COMPUTE], [*FAMILIES]]), ids=str)
def test_every_dtype(every_path: str, dtype: torch.dtype, compute: str, family: str) -> None:
    sizes = {"hidden_size": 17, "intermediate_size": 11}
    layer = make(dtype, **FAMILIES[family], **COMPUTE[compute], **sizes)
    x = tokens(layer, 2, 13)
    output = layer(x)
    assert output.hidden_states.dtype == dtype
    assert output.aux_loss.dtype == output.stats.router_entropy.dtype
    assert output.aux_loss.dtype == torch.promote_types(dtype, torch.float32)
    assert_meets_specification(layer, x, 4 * tolerance(dtype, 2))


SITUATIONS: dict[str, tuple[tuple[int, ...], Options]] = {
    "no_token": ((0,), {}),
    "sequences_without_token": ((2, 0), {}),
    "no_sequence": ((0, 4), {}),
    "neither": ((0, 0), {}),
    "one_token": ((1,), {}),
    "sequences_of_one_token": ((5, 1), {}),
    "one_expert": ((3, 2), {"num_experts": 1, "top_k": 1}),
    "all_experts": ((2, 5), {"top_k": 6}),
    "many_experts": ((1, 3), {"num_experts": 40, "top_k": 2}),
    "width_one": ((2, 4), {"hidden_size": 1, "intermediate_size": 1}),
}


@pytest.mark.parametrize(
    ("situation", "name", "weights_to"), pairwise([[*SITUATIONS], [*COMPUTE], ["output", "input"]])
)
def test_situations(every_path: str, name: str, weights_to: str, situation: str) -> None:
    (shape, options), compute = SITUATIONS[situation], COMPUTE[name]
    features = {"expert_bias": True, "load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
    if "capacity_factor" in compute:  # a capacity factor above num_experts is refused
        limit = float(options.get("num_experts", SIZES["num_experts"]))
        compute = {**compute, "capacity_factor": min(compute["capacity_factor"], limit)}
    layer = make(apply_weights_to=weights_to, num_shared_experts=1, **features, **options, **compute)
    assert_meets_specification(layer, tokens(layer, *shape))


@pytest.mark.parametrize("top_k", [1, 3])
@each_compute
def test_all_to_the_same_experts(every_path: str, compute: Options, top_k: int) -> None:
    options = {"normalization": "none", "score_correction_bias": True, "load_balance_loss_weight": 0.3}
    layer = make(top_k=top_k, **options, **compute)
    assert layer.router.score_correction_bias is not None
    layer.router.score_correction_bias[2 : 2 + top_k] = 30.0
    x = tokens(layer, 2, 5)
    assert layer(x).stats.tokens_per_expert.tolist() == [0, 0, *[10] * top_k, *[0] * (4 - top_k)]
    assert_meets_specification(layer, x)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("score_function", get_args(ScoreFunction))
@pytest.mark.parametrize("normalization", get_args(Normalization))
@pytest.mark.parametrize("weights_to", ["output", "input"])
def test_gradcheck_of_routing(weights_to: str, normalization: str, score_function: str) -> None:
    for bias, groups in product((False, True), ((1, 1), (3, 2))):
        layer = make(
            score_function=score_function,
            normalization=normalization,
            apply_weights_to=weights_to,
            router_bias=bias,
            score_correction_bias=bias,
            num_groups=groups[0],
            top_k_groups=groups[1],
            load_balance_loss_weight=0.3,
            router_z_loss_weight=0.2,
        )
        assert_gradcheck(layer, tokens(layer, 2, 2))


@pytest.mark.sampled(13)
@each_compute
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 3)], ids=str)
@each_family
def test_gradcheck_of_families(options: Options, shape: tuple[int, ...], compute: Options) -> None:
    layer = make(hidden_size=3, intermediate_size=2, **options, **compute)
    assert_gradcheck(layer, tokens(layer, *shape))


def test_sizes_in_place_of_a_config_are_refused() -> None:
    with pytest.raises(TypeError, match=r"config must be a maxmoe\.MoEConfig, got int"):
        MoE(64)  # type: ignore[arg-type]
