"""Time of each operator on a device, through its CUDA kernel and through PyTorch's operators, beside a copy of memory.

    python -m device.rows --device cuda --out results.json

Every row is counted once for each time that it must be read or written. Products of float16 and float32 are timed for
several numbers of rows per group, from which `benchmarks.device_report` says where PyTorch's products are faster.
"""

from collections.abc import Callable, Iterator
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


def check(cases: Cases) -> None:
    """Time the operators."""
    cases.run("ceilings", "copy", speed.copy_ceiling)
    shapes: dict[str, Shape] = speed.TINY if cases.is_tiny else SHAPES
    for name, shape in shapes.items():
        problem = experts.draw(shape, torch.bfloat16, cases.device)
        for timed in operators(problem):
            cases.run(name, timed.name, both, timed)
        del problem
    for dtype in (torch.float16, torch.float32):
        group = f"gmm, {str(dtype).removeprefix('torch.')}"
        for rows_per_group in ROWS_PER_GROUP[:1] if cases.is_tiny else ROWS_PER_GROUP:
            cases.run(group, f"{rows_per_group} rows per group", product, dtype, rows_per_group)


if __name__ == "__main__":
    main("rows", check)
