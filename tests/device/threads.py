"""Experts on the CPU of the machine, on 1 to all threads, beside dense products of the same FLOPs.

    python -m device.threads --out results.json

MAXMOE_ISA chooses the instruction set of our kernels, ONEDNN_MAX_CPU_ISA the one of torch's products, which we call in
bfloat16 if the processor has matrix units (AMX). Each choice is a group of the file. The large shape is timed without
one.
"""

import os
import time
from collections.abc import Callable

import torch

from benchmarks.shapes import A, B, Shape
from device import experts
from device.cases import Cases, Values, main
from device.speed import TINY
from maxmoe import build_info

SHAPES = {"A": A, "B": B}
LARGE = {"Qwen3-30B-A3B, 64 experts": Shape(2048, 2048, 768, 64, 8)}
CHOICES = ("MAXMOE_ISA", "ONEDNN_MAX_CPU_ISA")
NUM_CALLS = 3


def setting() -> str:
    """Return the instruction sets in use."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return build_info()["isa"] + (f", oneDNN up to {limit}" if limit else "")


def dense_products(problem: experts.Problem) -> Callable[[], None]:
    """Return a function with nine dense products of all rows: three of the forward, six of the backward."""
    D, F = problem.up.shape[1:]
    rows = problem.experts.numel()
    left, back = problem.x.repeat(problem.experts.shape[1], 1), problem.x.new_ones(rows, F)
    matrix = problem.up[0]
    assert left.shape == (rows, D) and matrix.shape == (D, F)

    def run() -> None:
        for _ in range(3):
            torch.mm(left, matrix)
            torch.mm(back, matrix.t())
            torch.mm(left.t(), back)

    return run


def best_times(_cases: Cases, problem: experts.Problem, num_threads: int) -> Values:
    """Time experts and bound in turn; the best of each."""
    torch.set_num_threads(num_threads)
    bodies = {"ours": lambda: experts.ours(problem, backward=True), "bound": dense_products(problem)}
    seconds: dict[str, list[float]] = {name: [] for name in bodies}
    for call in range(NUM_CALLS + 1):
        for name, body in bodies.items():
            start = time.perf_counter()
            body()
            if call > 0:
                seconds[name].append(time.perf_counter() - start)
    ours, bound = min(seconds["ours"]), min(seconds["bound"])
    D, F = problem.up.shape[1:]
    flops = 18 * problem.experts.numel() * D * F
    times = {"ours_ms": round(1e3 * ours, 2), "bound_over_ours": round(bound / ours, 2)}
    return {"threads": num_threads, **times, "gflops": round(flops / ours / 1e9)}


def check(cases: Cases) -> None:
    """Time the experts on the CPU, forward and backward."""
    counts = [2**power for power in range(8) if 2**power <= (os.cpu_count() or 1)][: 1 if cases.is_tiny else None]
    is_chosen = any(name in os.environ for name in CHOICES)
    shapes = TINY if cases.is_tiny else SHAPES if is_chosen else SHAPES | LARGE
    for name, shape in shapes.items():
        for dtype in (torch.bfloat16, torch.float32):
            problem = experts.draw(shape, dtype, torch.device("cpu"))
            for count in counts:
                case = f"{name}, {str(dtype).removeprefix('torch.')}, {count} threads"
                cases.run(setting(), case, best_times, problem, count)


if __name__ == "__main__":
    main("threads", check)
