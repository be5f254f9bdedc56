"""Moving rows: `ragged_gather` and `ragged_gather_reduce`, weighted, in random order, against copying.

R rows of D elements of s bytes, an index (8 bytes) and a weight (4 bytes) for each row; K = 8 rows make a sum. The
bytes that must be read or written: 2 R D s + 12 R for the gather, (1 + 1/K) R D s + 12 R for the sums. The bound is the
bandwidth of `copy_` of all rows, in order, into a tensor of the same size: it reads the same bytes, and fits into the
same caches. A second bound copies the same rows in the same random order, because each short row takes a page lookup in
any implementation. The allocator is set to keep freed memory: with its default settings it returns such large results
to the system, and new pages at every call would cost more than the copy.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE, disagreement
from benchmarks.figures import time_panels
from benchmarks.results import Case, Result, by_case, table, timing_report
from benchmarks.shapes import ROWS, RowsShape
from benchmarks.timing import Runner
from maxmoe.ops import ragged_gather, ragged_gather_reduce

GROUP_SIZE = 8
MODES = ["ragged_gather", "ragged_gather_reduce"]


class Inputs(NamedTuple):
    """Rows ``(R, D)``, the order to move them in ``(R,)``, and their weights ``(R,)``, float32."""

    rows: Tensor
    order: Tensor
    weights: Tensor


def make_inputs(shape: RowsShape, dtype: torch.dtype) -> Inputs:
    """Whole groups of rows, in random order."""
    generator = torch.Generator().manual_seed(0)
    num_rows = shape.num_rows - shape.num_rows % GROUP_SIZE
    rows = torch.randn(num_rows, shape.hidden_size, generator=generator).to(dtype)
    weights = torch.rand(num_rows, generator=generator).to(dtype).float()
    return Inputs(rows, torch.randperm(num_rows, generator=generator), weights)


def in_maxmoe(mode: str, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """maxmoe's operator."""
    if mode == "ragged_gather":
        return ragged_gather(rows, index, weights)
    return ragged_gather_reduce(rows, index, GROUP_SIZE, weights)


def in_torch(mode: str, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    gathered = rows.index_select(0, index).mul_(weights.to(rows.dtype).unsqueeze(1))
    return gathered if mode == "ragged_gather" else gathered.view(-1, GROUP_SIZE, rows.shape[1]).sum(1)


def bytes_to_move(mode: str, inputs: Inputs) -> int:
    """The minimum number of bytes that the operator reads and writes."""
    sums_per_row = 1 if mode == "ragged_gather" else 1 / GROUP_SIZE
    per_row = inputs.order.element_size() + inputs.weights.element_size()
    return int(inputs.rows.nbytes * (1 + sums_per_row)) + per_row * len(inputs.order)


def measure(session: Session, case: Case) -> None:
    """Time one operator on one table of rows."""
    assert isinstance(case.shape, RowsShape)
    inputs = make_inputs(case.shape, case.dtype)
    target = torch.zeros_like(inputs.rows)
    calls: dict[str, tuple[str, Callable[[], Tensor]]] = {
        "maxmoe": ("maxmoe", lambda: in_maxmoe(case.mode, *inputs)),
        "torch index_select": ("alternative", lambda: in_torch(case.mode, *inputs)),
        "bound: copy_": ("bound", lambda: target.copy_(inputs.rows)),
        "bound: rows copied": ("bound", lambda: torch.index_select(inputs.rows, 0, inputs.order, out=target)),
    }
    ours, theirs = ({"output": function(case.mode, *inputs)} for function in (in_maxmoe, in_torch))
    reason = disagreement(theirs, ours, TOLERANCE[case.dtype])
    if reason is not None:
        raise RuntimeError(f"{case.mode} of maxmoe and torch differ: {reason}")
    del ours, theirs
    runners = [Runner(name, call, kind) for name, (kind, call) in calls.items()]
    session.time(case, runners, {"bytes": bytes_to_move(case.mode, inputs), "copied": 2 * inputs.rows.nbytes})


def summary(results: list[Result]) -> str:
    """Bandwidths, a line for each case."""
    rows = []
    for case, group in by_case(results).items():
        if len(group) < 4:
            continue
        speeds = [
            result.numbers["copied" if result.kind == "bound" else "bytes"] / result.best / 1e9 for result in group
        ]
        ours, theirs, copy, rows_copied = speeds
        share = [f"{ours / other:.2f}" for other in (copy, rows_copied, theirs)]
        rows.append([case.mode, case.name, case.dtype_name, *(f"{speed:.1f}" for speed in speeds), *share])
    header = ["operator", "D", "dtype", "maxmoe GB/s", "torch", "copy_", "rows copied"]
    header += ["maxmoe / copy_", "maxmoe / rows copied", "maxmoe / torch"]
    return f"Summary: bytes that must move / best time\n{table(header, rows)}" if rows else ""


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary)


def keep_freed_memory() -> None:
    """Turn off the mapping of single buffers and the trimming of the heap (glibc)."""
    trim_threshold, mmap_max, never = -1, -4, -1
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, never)


BENCHMARK = Benchmark("ragged", __doc__, ROWS, MODES, measure, report, time_panels)

if __name__ == "__main__":
    keep_freed_memory()
    main(BENCHMARK)
