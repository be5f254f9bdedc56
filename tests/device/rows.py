"""Time of each operator on a device, through its CUDA kernel and through PyTorch's operators, beside a copy of memory.

    python -m device.rows --device cuda --out results.json

Every row is counted once for each time that it must be read or written. Products of float16 and float32 are timed for
several numbers of rows per group, from which `benchmarks.device_report` says where PyTorch's products are faster.
Candidates of kernels are timed if `make cuda-candidates` has built them, and their library is in .device.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import Shape
from device import experts, speed
from device.cases import Cases, Values, main, rounded
from maxmoe import ops

SHAPES = {name: shape for name, shape in speed.SHAPES.items() if shape.num_tokens > 1000}
ROWS_PER_GROUP = (32, 128, 256, 512, 2048)
NUM_GROUPS = 8
CANDIDATES = Path(".device/libmaxmoe_cuda_candidates.so")


class Timed(NamedTuple):
    """A call of an operator, and the bytes that it must move."""

    name: str
    call: Callable[[], object]
    num_bytes: int


def operators(problem: experts.Problem) -> Iterator[Timed]:
    """Yield the operators on rows of one shape."""
    x, weights, chosen, *_ = problem
    T, K, E = len(x), chosen.shape[1], len(problem.down)
    plan = ops.ragged_plan(chosen, E, num_rows=chosen.numel())
    tokens = plan.slots // K
    rows, logits = x.index_select(0, tokens), torch.randn(T, E, device=x.device)
    of_tokens, of_rows, of_plan = x.nbytes, rows.nbytes, 8 * chosen.numel()
    yield Timed("ragged_plan", lambda: ops.ragged_plan(chosen, E, num_rows=chosen.numel()), 3 * of_plan)
    yield Timed("route", lambda: ops.route(logits, K), 2 * logits.nbytes + 12 * chosen.numel())
    yield Timed("ragged_gather", lambda: ops.ragged_gather(x, tokens), 2 * of_rows)
    yield Timed("ragged_gather, weights", lambda: ops.ragged_gather(x, tokens, weights.flatten()), 2 * of_rows)
    total = of_rows + of_tokens
    yield Timed("ragged_gather_reduce", lambda: ops.ragged_gather_reduce(rows, plan.rows, K, weights.flatten()), total)
    yield Timed("ragged_dot", lambda: ops.ragged_dot(x, rows, plan.rows, K), total)
    yield Timed("ragged_scatter_add", lambda: ops.ragged_scatter_add(rows, tokens, T), total)


def both(cases: Cases, timed: Timed) -> Values:
    """Time an operator through its kernel and through ATen."""
    ms = speed.milliseconds(cases, timed.call)
    with ops.force_aten():
        aten_ms = speed.milliseconds(cases, timed.call)
    return {"ms": rounded(ms), "aten_ms": rounded(aten_ms), "bytes": timed.num_bytes}


def product(cases: Cases, dtype: torch.dtype, rows_per_group: int) -> Values:
    """Time the product of groups of rows, ours and of ATen.

    Empty groups keep the rows per group below the limit from which PyTorch's products are chosen.
    """
    D, F = (16, 16) if cases.is_tiny else (2048, 1024)
    num_rows = NUM_GROUPS * rows_per_group
    num_empty = 0 if cases.is_tiny else num_rows // 200
    lhs = torch.randn(num_rows, D, device=cases.device).to(dtype)
    rhs = torch.randn(NUM_GROUPS, D, F, device=cases.device).to(dtype)
    sizes = torch.full((NUM_GROUPS,), rows_per_group, device=cases.device)

    def multiply(matrices: Tensor, counts: Tensor) -> Tensor:
        return ops.gmm(lhs, matrices, counts)

    padded = rhs[torch.arange(NUM_GROUPS + num_empty, device=cases.device) % NUM_GROUPS]
    counts = torch.cat([sizes, sizes.new_zeros(num_empty)])
    ms = speed.milliseconds(cases, lambda: multiply(padded, counts))
    with ops.force_aten():
        aten_ms = speed.milliseconds(cases, lambda: multiply(rhs, sizes))
    return {"ms": rounded(ms), "aten_ms": rounded(aten_ms), "flops": 2 * num_rows * D * F, "rows": rows_per_group}


def candidates(cases: Cases, problem: experts.Problem, library: ctypes.CDLL) -> None:
    """Time variants of the sum over slots and of silu, beside the kernels that operators run."""
    x, weights, chosen, _, up, *_ = problem
    plan = ops.ragged_plan(chosen, len(problem.down), num_rows=chosen.numel())
    rows = x.index_select(0, plan.slots // chosen.shape[1])
    gate = torch.randn(len(rows), up.shape[2], device=x.device, dtype=x.dtype)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def call(function: Callable[..., None], *arguments: Tensor | int) -> None:
        pointers = [
            ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else ctypes.c_int64(each)
            for each in arguments[1:]
        ]
        function(ctypes.c_int(arguments[0]), *pointers, stream)

    def timed(cases: Cases, function: Callable[..., None], num_bytes: int, *arguments: Tensor | int) -> Values:
        ms = speed.milliseconds(cases, lambda: call(function, *arguments))
        return {"ms": rounded(ms), "bytes": num_bytes}

    of_sum = (rows, *rows.shape, plan.rows, chosen.shape[1], weights, torch.empty_like(x), len(x))
    for ahead in (1, 2, 4, 8):
        arguments = (library.maxmoe_candidate_of_sum, rows.nbytes + x.nbytes, ahead, *of_sum)
        cases.run("candidates of the sum", f"{ahead} rows ahead", timed, *arguments)
    of_silu = (gate, gate.flip(0), torch.empty_like(gate), *gate.shape)
    for name, number in (("exact", 0), ("approximated", 1)):
        arguments = (library.maxmoe_candidate_of_silu, 3 * gate.nbytes, number, *of_silu)
        cases.run("candidates of silu", name, timed, *arguments)


def check(cases: Cases) -> None:
    """Time the operators."""
    cases.run("ceilings", "copy", speed.copy_ceiling)
    shapes: dict[str, Shape] = speed.TINY if cases.is_tiny else SHAPES
    for name, shape in shapes.items():
        problem = experts.draw(shape, torch.bfloat16, cases.device)
        for timed in operators(problem):
            cases.run(name, timed.name, both, timed)
        if cases.is_cuda and CANDIDATES.exists() and name == next(iter(shapes)):
            candidates(cases, problem, ctypes.CDLL(str(CANDIDATES.resolve())))
        del problem
    for dtype in (torch.float16, torch.float32):
        group = f"gmm, {str(dtype).removeprefix('torch.')}"
        for rows_per_group in ROWS_PER_GROUP[:1] if cases.is_tiny else ROWS_PER_GROUP:
            cases.run(group, f"{rows_per_group} rows per group", product, dtype, rows_per_group)


if __name__ == "__main__":
    main("rows", check)
