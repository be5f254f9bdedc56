"""The layer against `maxmoe.reference` in float64: outputs, losses, statistics and all gradients.

A row of a table is a config, a way to compute the experts and an implementation of the operators: CPU kernels, ATen, or
the CUDA kernels in their emulator. Rows are pairwise: any choice of a column meets any choice of another one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from maxmoe import MoE, ZeroComputation
from maxmoe.nn.local_dispatcher import LocalCounts
from support.moe_layers import (
    COMPUTE,
    FAMILIES,
    LAYERS,
    LOSSES,
    Options,
    assert_meets_specification,
    each_compute,
    make,
    outcome,
    tokens,
)
from support.operator_calls import assert_near, tolerance
from support.pairwise import pairwise
from support.shapes import DTYPES

PATHS = ["cpu", "aten", "cuda"]


def each_row(
    names: str, columns: Sequence[Iterable[Any]], is_default: Callable[..., bool], **options: Any
) -> pytest.MarkDecorator:
    """Pairwise rows of the columns and of the paths. By default, some run, and none in the emulator, which is slow."""
    rows = [
        pytest.param(*row, marks=[] if row[-1] != "cuda" and is_default(*row) else pytest.mark.slow)
        for row in pairwise([*map(list, columns), PATHS])
    ]
    return pytest.mark.parametrize(f"{names}, every_path", rows, indirect=["every_path"], **options)


@each_row(
    "name, compute",
    [LAYERS, ["sparse", "buffer", "dense", "capacity"]],
    lambda name, compute, _: compute in ("sparse", "capacity") or "zero_computation" in LAYERS[name],
)
def test_named_layers(every_path: str, name: str, compute: str) -> None:
    """Several sequences, no tokens, one token, and NaN in padding."""
    assert_meets_specification(make(**{**LOSSES, **LAYERS[name], **COMPUTE[compute]}))


@pytest.mark.parametrize("every_path", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", ["deepseek", "gpt_oss", "latent, weights on the input", "inkling, zero computation"])
def test_layers_in_the_emulator(every_path: str, name: str) -> None:
    """By default, these alone."""
    layer = make(**{**LOSSES, **LAYERS[name]})
    assert_meets_specification(layer, tokens(layer, 3, 6))


NARROW = [*FAMILIES, "muse_spark", "inkling", "zaya"]


@each_row("name, compute, dtype", [NARROW, COMPUTE, DTYPES[1:]], lambda *_: True, ids=str)
def test_other_dtypes(every_path: str, name: str, compute: str, dtype: torch.dtype) -> None:
    layer = make(dtype, **{**LAYERS[name], **COMPUTE[compute], "hidden_size": 17, "intermediate_size": 11})
    x = tokens(layer, 2, 13)
    if not layer.config.router_rule.takes_state:
        output = layer(x)
        assert output.hidden_states.dtype == dtype
        assert output.aux_loss.dtype == output.stats.router_entropy.dtype == torch.float32
    assert_meets_specification(layer, x, 4 * tolerance(dtype, 2))


ONLY_COPIES = [0.0] * 6 + [30.0] * 4
SITUATIONS: dict[str, tuple[tuple[int, ...], Options]] = {
    "sequences_without_token": ((2, 0), {}),
    "no_sequence": ((0, 4), {}),
    "neither": ((0, 0), {}),
    "sequences_of_one_token": ((5, 1), {}),
    "one_expert": ((3, 2), {"num_experts": 1, "top_k": 1}),
    "all_experts": ((2, 5), {"top_k": 6}),
    "many_experts": ((1, 3), {"num_experts": 40, "top_k": 2}),
    "width_one": ((2, 4), {"hidden_size": 1, "intermediate_size": 1}),
    "no_expert_computes": (
        (2, 4),
        {"zero_computation": ZeroComputation(copy=4), "score_correction_bias": True, "correction_bias": ONLY_COPIES},
    ),
}


@each_row("situation, compute, weights_to", [SITUATIONS, COMPUTE, ["output", "input"]], lambda *_: True)
def test_situations(every_path: str, situation: str, compute: str, weights_to: str) -> None:
    shape, options = SITUATIONS[situation]
    options = {**LOSSES, "expert_bias": True, "num_shared_experts": 1, **COMPUTE[compute], **options}
    if "capacity_factor" in options:  # above num_experts it is refused
        options["capacity_factor"] = min(options["capacity_factor"], float(options.get("num_experts", 6)))
    layer = make(apply_weights_to=weights_to, **options)
    assert_meets_specification(layer, tokens(layer, *shape))


@each_compute
def test_an_expert_without_tokens_is_never_heard(path: str, compute: Options) -> None:
    """Infinite and NaN parameters of an expert without tokens reach no result, not even times zero."""
    options = {"top_k": 1, "normalization": "none", "expert_bias": True}
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, -100.0, 0.0])
    layer = make(score_correction_bias=True, correction_bias=bias, **options, **compute)
    x = tokens(layer)
    expected = outcome(layer, x)
    assert expected.outputs[2][4] == 0
    with torch.no_grad():
        layer.experts.up_proj[4] = float("nan")
        layer.experts.down_proj[4] = float("inf")
    got = outcome(layer, x)
    assert_near(got.outputs[0], expected.outputs[0], 1e-14, "hidden_states")
    for name in ("x", "router.weight"):
        assert_near(got.gradients[name], expected.gradients[name], 1e-14, f"gradient of {name}")


def test_capacity_beyond_the_slots_of_a_sequence_costs_nothing() -> None:
    """A sequence of one token has two slots: the buffer has two rows per expert, not the capacity of 64."""
    layer = make(implementation="dense", num_experts=64, top_k=2, capacity_factor=64.0)
    x = tokens(layer, 3, 1).flatten(0, 1)
    dispatched = layer.runner.dispatcher.dispatch(x, layer.router(x).top_k, LocalCounts(3))()
    assert dispatched.x.shape[0] == 64 * 3 * 2 and dispatched.dropped == 0


def test_sizes_in_place_of_a_config_are_refused() -> None:
    with pytest.raises(TypeError, match=r"config must be a maxmoe\.MoEConfig, got int"):
        MoE(64)  # type: ignore[arg-type]
