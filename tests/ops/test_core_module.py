"""The functions of maxmoe._C: types of arguments, fake and meta tensors, threads, references; equal to torch.ops."""

import gc
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import maxmoe
from maxmoe import _C, ops
from maxmoe._torch import FakeTensorMode
from maxmoe.quantization import quantize

Arguments = dict[str, Any]


def calls() -> dict[str, Arguments]:
    """One call of each function of the module on tensors: 5 tokens, 2 experts each out of 3, D = 4, F = 6."""
    experts = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [2, 1]])
    plan = ops.ragged_plan(experts, 3, num_rows=10)
    x, rows, weights = torch.randn(5, 4), torch.randn(10, 4), torch.rand(5, 2)
    factors = ops.LowRankFactors(torch.randn(3, 4, 2), torch.randn(3, 2, 6), 0.5)
    up = ops.Projection(torch.randn(3, 4, 6), torch.randn(3, 6), factors)
    down, stack = torch.randn(3, 6, 4), quantize(torch.randn(3, 4, 6), "mxfp4")
    constants = {"activation": "silu", "limit": 1.0, "limit_target": "input", "gate_softcap": None, "up_softcap": None}
    rules = {"top_k": 2, "score_function": "softmax", "correction_bias": torch.randn(3), "num_groups": 1}
    rules |= {"top_k_groups": 1, "group_score": "top2", "normalization": "sum", "scale": 1.0}
    bounds = {"first_expert": 0, "num_local_experts": 3, "max_rows": None, "num_rows": 10}
    of_rows = {"index": plan.rows, "group_size": 2, "weights": torch.rand(10)}
    ffn = {"x": x, "weights": weights, "plan": plan, "gate": up, "up": up, "down": down, **constants}
    return {
        "dequantize": {"codes": stack.codes, "scales": stack.scales, "zeros": None, "row_scales": None}
        | {"format": "mxfp4", "columns": 4, "dtype": torch.float32},
        "expert_ffn": ffn | {"fused_gate": None, "recompute": False},
        "gmm": {"lhs": rows, "rhs": stack, "group_sizes": plan.group_sizes, "group_offset": 0},
        "linear": {"x": x, "weight": torch.randn(3, 4), "bias": torch.randn(3), "out_dtype": torch.float64},
        "ragged_dot": {"a": x, "b": rows, "index": plan.rows, "group_size": 2},
        "ragged_gather": {"x": x, "index": plan.slots // 2, "weights": torch.rand(10), "start": 1, "end": 9},
        "ragged_gather_reduce": {"rows": rows, **of_rows, "valid": torch.rand(10) > 0.3},
        "ragged_plan": {"experts": experts, "num_experts": 3, **bounds},
        "ragged_scatter_add": {"rows": x, "index": plan.rows, "num_rows": 10, "group_size": 2, "weights": None},
        "ragged_sort": {"x": x, "plan": plan, "weights": weights},
        "ragged_unsort": {"rows": rows, "plan": plan, "weights": weights},
        "route": {"logits": torch.randn(5, 3), **rules, "experts": experts},
        "router_entropy": {"probabilities": torch.rand(5, 3), "divisor": 5},
        "tgmm": {"lhs": rows, "rhs": rows, "group_sizes": plan.group_sizes, "num_local_groups": 3, "group_offset": 0},
    }


OF_LIBRARY = {"build_info", "empty_cache", "force_path", "memory_allocated", "memory_reserved"}
OF_LAYERS = {"RoutedExperts", "are_false"}
NAMES = sorted({name for name in vars(_C) if not name.startswith("_")} - OF_LIBRARY - OF_LAYERS)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_type_is_named(name: str) -> None:
    """Before anything is computed: the argument, what it must be, and what was given."""
    function, arguments = getattr(_C, name), calls()[name]
    function(**arguments)
    optional = set(re.findall(r"(\w+): [^,]*None", function.__doc__.splitlines()[0]))
    for argument, value in arguments.items():
        wrong: list[Any] = [object(), *([None] if argument not in optional else [])]
        wrong += [1] if isinstance(value, str | Tensor | tuple) else ["1"] if isinstance(value, int | float) else []
        for given in wrong:
            message = rf"^maxmoe::{name}: {argument} must be .*, got {type(given).__name__}$"
            with pytest.raises(TypeError, match=message):
                function(**arguments | {argument: given})


def test_fields_of_projections_and_plans_are_named() -> None:
    arguments, plan = calls()["expert_ffn"], calls()["ragged_sort"]["plan"]
    for changed, message in (
        ({"up": arguments["up"]._replace(bias=1)}, r"maxmoe::expert_ffn: up.bias must be a tensor, got int"),
        ({"plan": plan._replace(rows=None)}, r"maxmoe::expert_ffn: plan.rows must be a tensor, got NoneType"),
        ({"plan": tuple(plan)}, r"maxmoe::expert_ffn: plan must be a maxmoe.ops.RaggedPlan, got tuple"),
        ({"up": arguments["up"]._replace(factors=1)}, r"up.factors must be maxmoe.ops.LowRankFactors, got int"),
    ):
        with pytest.raises(TypeError, match=message):
            _C.expert_ffn(**arguments | changed)
    product = calls()["gmm"]
    with pytest.raises(ValueError, match=r"maxmoe::gmm: rhs must be a stack of matrices \(L, in, out\), got \(4, 6\)"):
        _C.gmm(**product | {"rhs": product["rhs"][0]})


def moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Move the tensors in an argument."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, maxmoe.quantization.QuantizedStack):
        return value.map(move)
    if isinstance(value, tuple):
        return type(value)(*(moved(item, move) for item in value))
    return value


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("name", NAMES)
def test_meta_and_fake_tensors(name: str, kind: str) -> None:
    arguments = calls()[name]
    expected = getattr(_C, name)(**arguments)
    if kind == "meta":
        got = getattr(_C, name)(**{key: moved(value, lambda t: t.to("meta")) for key, value in arguments.items()})
    else:
        with FakeTensorMode() as mode:
            given = {key: moved(value, mode.from_tensor) for key, value in arguments.items()}
            got = getattr(_C, name)(**given)
    parts = zip(*((out if isinstance(out, tuple) else (out,)) for out in (got, expected)), strict=True)
    for fake, real in parts:
        if isinstance(real, Tensor):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
            assert fake.is_meta or isinstance(fake, torch._subclasses.FakeTensor)


def test_other_threads_run_during_a_kernel() -> None:
    """The interpreter lock is released: with it, this thread would stand still until the product has ended."""
    lhs, rhs, sizes = torch.randn(4096, 1024), torch.randn(1, 1024, 4096), torch.tensor([4096])
    running, turns = threading.Event(), 0

    def multiply() -> None:
        running.set()
        ops.gmm(lhs, rhs, sizes)

    thread = threading.Thread(target=multiply)
    thread.start()
    running.wait()
    while thread.is_alive():
        turns += 1
        thread.join(0)
    assert turns > 100


def test_no_references_leak() -> None:
    """Over 10^4 calls, and as many errors."""
    given = calls()
    arguments = [(getattr(_C, name), given[name]) for name in ("expert_ffn", "gmm", "ragged_plan", "ragged_sort")]
    plan = given["ragged_sort"]["plan"]

    def run(times: int) -> None:
        for _ in range(times):
            for function, values in arguments:
                function(**values)
            with pytest.raises(TypeError):
                _C.ragged_sort(plan, plan, None)

    run(50)
    gc.collect()
    before = sys.getallocatedblocks(), sys.getrefcount(plan), sys.getrefcount(plan.slots)
    run(2_000)
    gc.collect()
    assert sys.getallocatedblocks() - before[0] < 1000
    assert before[1:] == (sys.getrefcount(plan), sys.getrefcount(plan.slots))
