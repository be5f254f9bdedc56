"""A layer that is recomputed, replayed, compiled or under autocast gives what it gives when it is called plainly."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE
from support.moe_layers import (
    COMPUTE,
    DEEPSEEK,
    LAYERS,
    LOSSES,
    Options,
    each_family,
    make,
    others_for,
    outcome,
    tokens,
)
from support.operator_calls import assert_near, assert_same, tolerance
from support.operator_checks import compile_whole
from support.pairwise import pairwise

each_layer = pytest.mark.parametrize("name", LAYERS)


def recompute_names(layer: MoE) -> set[str]:
    return {name for module in layer.modules() for name in getattr(module, "recompute_names", ())}


@each_layer
def test_recomputed_and_replayed(name: str) -> None:
    layer = make(**{**LOSSES, **LAYERS[name]})
    x = tokens(layer, 3, 8)
    expected = outcome(layer, x)
    for options in ({}, {"context_fn": maxmoe.keep_routing}):
        assert_same(outcome(layer, x, partial(checkpoint, layer, use_reentrant=False, **options)), expected)
    with maxmoe.record_routing(layer) as record:
        layer(x, **others_for(layer, x))
    with maxmoe.replay_routing(layer, record):
        assert_same(outcome(layer, x), expected, 1e-14)
    maxmoe.set_recompute(layer, recompute_names(layer))
    assert_same(outcome(layer, x), expected)


# Layers, and whether they are compiled with a mask.
COMPILED = [
    ("hash", "capacity", True),
    ("inkling, zero computation", "sparse", False),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("hash", "capacity", False),
            ("inkling, zero computation", "sparse", True),
            ("muse_spark", "sparse", True),
            ("zaya", "dense", False),
            ("gpt_oss", "buffer", True),
            ("llama4", "capacity", False),
            ("zero by logits", "sparse", True),
            ("pools", "dense", True),
        )
    ),
]


# A warning of torch that is hidden unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("name", "compute", "is_masked"), COMPILED)
def test_compiled_as_one_graph(name: str, compute: str, is_masked: bool) -> None:
    layer = make(**{**LOSSES, **LAYERS[name], **COMPUTE[compute]})
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1]]).bool() if is_masked else None
    x, compiled = tokens(layer, 2, 6), compile_whole(layer, "aot_eager")
    assert_same(outcome(layer, x, compiled, mask), outcome(layer, x, token_mask=mask), 1e-12)


def test_compiled_with_inductor() -> None:
    layer = make(torch.float32, **DEEPSEEK)
    x = tokens(layer)
    compiled = compile_whole(layer, "inductor")
    assert_same(outcome(layer, x, compiled), outcome(layer, x), 4 * tolerance(torch.float32, 1))


def test_compiled_under_autocast() -> None:
    layer = make(torch.float32, **DEEPSEEK)
    x = tokens(layer)
    compiled = compile_whole(layer, "aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(outcome(layer, x, compiled), outcome(layer, x), tolerance(torch.bfloat16, 4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd() -> None:
    """It records the backward of the layer, and computes its gradients."""
    layer = make(load_balance_loss_weight=0.3)
    x = tokens(layer)
    expected = outcome(layer, x)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        got = outcome(layer, x)
    torch._dynamo.reset()
    assert_same(got, expected)


@pytest.mark.parametrize(
    ("compute", "dynamic"),
    [
        ("sparse", None),
        ("capacity", True),
        *(pytest.param(compute, None, marks=pytest.mark.slow) for compute in ("buffer", "dense", "capacity")),
    ],
)
def test_not_compiled_again_for_other_numbers_of_tokens(compute: str, dynamic: bool | None) -> None:
    layer = make(**LOSSES, **COMPUTE[compute])
    compilations: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled = compile_whole(layer, backend, dynamic=dynamic)
    for length in (5, 6, 9, 17, 40):
        x = tokens(layer, 2, length)
        for one, other in zip(compiled(x)[:2], layer(x)[:2], strict=True):
            torch.testing.assert_close(one, other)
    assert len(compilations) == (1 if dynamic else 2)  # the second compilation has a dynamic size


# A rounded preactivation may lie on the other side of a limit.
SMOOTH = [name for name in LAYERS if "limited" not in name]


@pytest.mark.parametrize(
    ("name", "compute", "dtype", "path"),
    pairwise([SMOOTH, ["sparse", "capacity"], [torch.bfloat16, torch.float16], ["cpu", "aten"]]),
    ids=str,
    indirect=["path"],
)
def test_autocast(path: str, name: str, compute: str, dtype: torch.dtype) -> None:
    """Results are close and in the autocast dtype, for any dtype of x; routing, losses and gradients stay float32."""
    layer = make(torch.float32, **{**LOSSES, **LAYERS[name], **COMPUTE[compute]})
    for x in (tokens(layer, 2, 9), tokens(layer, 2, 9).to(dtype)):
        expected = outcome(layer, x.float())
        with torch.autocast("cpu", dtype=dtype):
            got = outcome(layer, x)
        assert got.outputs[0].dtype == dtype
        assert torch.equal(got.outputs[1], expected.outputs[1])
        for of, gradient in got.gradients.items():
            assert gradient is not None and gradient.dtype == (x.dtype if of == "x" else torch.float32)
        # The upstream gradients differ by their rounding to 16 bits; through ATen activations are rounded, too.
        assert_same(got, expected, tolerance(dtype, 8 if path == "cpu" else 12))


@each_family
@pytest.mark.parametrize(
    ("held", "computed"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)], ids=str
)
def test_autocast_to_the_other_16_bits(held: torch.dtype, computed: torch.dtype, options: Options) -> None:
    """Parameters and tokens in bfloat16 under an autocast to float16, and the reverse: as in float32."""
    layer = make(held, **options)
    x = tokens(layer, 2, 9)
    expected = copy.deepcopy(layer).float()(x.float())
    with torch.autocast("cpu", dtype=computed):
        got = layer(x)
    assert got.hidden_states.dtype == computed
    assert_near(got.hidden_states, expected.hidden_states, tolerance(torch.bfloat16, 8), "hidden_states")
