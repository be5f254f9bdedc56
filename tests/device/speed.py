"""Time and peak memory of the experts on a device, beside `grouped_mm` by hand and both ceilings of the machine.

    python -m device.speed --device cuda --out results.json

Sizes of published models in bfloat16, 16384 tokens; of DeepSeek-V3 the experts that one of 8 ranks holds. Times are
medians of calls between two events of the device, after calls that are not timed.
"""

import statistics
import subprocess
import time
from collections.abc import Callable

import torch

from benchmarks.shapes import Shape
from device import experts
from device.cases import Cases, Values, main, rounded

SHAPES = {
    "Qwen3-30B-A3B": Shape(16384, 2048, 768, 128, 8),
    "Mixtral 8x7B": Shape(16384, 4096, 14336, 8, 2),
    "DeepSeek-V3, 32 experts": Shape(16384, 7168, 2048, 32, 8),
    "Qwen3-30B-A3B, 128 tokens": Shape(128, 2048, 768, 128, 8),
}
TINY = {"tiny": Shape(64, 64, 64, 8, 2)}
MODES = {"forward": False, "forward + backward": True}
WARM_UP_CALLS, MIN_CALLS, MAX_CALLS, SECONDS = 3, 6, 20, 0.5


def milliseconds(cases: Cases, body: Callable[[], object]) -> float:
    """Return the median time of a call."""
    start = time.perf_counter()
    for _ in range(WARM_UP_CALLS):
        body()
    synchronize(cases)
    seconds = (time.perf_counter() - start) / WARM_UP_CALLS
    num_calls = 1 if cases.is_tiny else min(max(int(SECONDS / seconds), MIN_CALLS), MAX_CALLS)
    return statistics.median(one_call(cases, body) for _ in range(num_calls))


def one_call(cases: Cases, body: Callable[[], object]) -> float:
    if not cases.is_cuda:
        start = time.perf_counter()
        body()
        return 1e3 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    body()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)


def synchronize(cases: Cases) -> None:
    if cases.is_cuda:
        torch.cuda.synchronize()


def experts_speed(cases: Cases, problem: experts.Problem, contender: str, *, backward: bool) -> Values:
    """Time a contender, and measure its peak of allocated memory above the problem."""
    T, D = problem.x.shape
    E, F, _ = problem.down.shape
    if cases.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated() if cases.is_cuda else 0
    ms = milliseconds(cases, lambda: experts.CONTENDERS[contender](problem, backward=backward))
    flops = (18 if backward else 6) * problem.experts.numel() * D * F
    values = {"ms": rounded(ms), "tflops": rounded(flops / ms / 1e9)}
    if cases.is_cuda:
        values["peak_mb"] = round((torch.cuda.max_memory_allocated() - allocated) / 1e6)
    return {"T": T, "D": D, "F": F, "E": E, "K": problem.experts.shape[1], **values}


def product_ceiling(cases: Cases) -> Values:
    """Dense product in bfloat16."""
    size = 64 if cases.is_tiny else 8192
    matrix = torch.randn(size, size, device=cases.device, dtype=torch.bfloat16)
    ms = milliseconds(cases, lambda: matrix @ matrix)
    values = {"size": size, "ms": rounded(ms), "tflops": rounded(2 * size**3 / ms / 1e9)}
    return values | ({"sm_clock_mhz": sm_clock(cases, lambda: matrix @ matrix)} if cases.is_cuda else {})


def sm_clock(cases: Cases, body: Callable[[], object]) -> int | None:
    """Return the clock of the multiprocessors while calls run, in MHz."""
    for _ in range(1000):
        body()
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={cases.device.index or 0}"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    synchronize(cases)
    return int(said) if said.isdigit() else None


def copy_ceiling(cases: Cases) -> Values:
    """Copy of memory, bytes read and bytes written."""
    num_bytes = 2**12 if cases.is_tiny else 2**31
    source = torch.ones(num_bytes, dtype=torch.uint8, device=cases.device)
    target = torch.empty_like(source)
    ms = milliseconds(cases, lambda: target.copy_(source))
    return {"bytes": num_bytes, "ms": rounded(ms), "gb_per_second": rounded(2 * num_bytes / ms / 1e6)}


def check(cases: Cases) -> None:
    """Time the experts."""
    cases.run("ceilings", "product", product_ceiling)
    cases.run("ceilings", "copy", copy_ceiling)
    for name, shape in (TINY if cases.is_tiny else SHAPES).items():
        problem = experts.draw(shape, torch.bfloat16, cases.device)
        for mode, backward in MODES.items():
            for contender in experts.CONTENDERS:
                group = f"{name}: {mode}"
                cases.run(group, contender, experts_speed, problem, contender, backward=backward)
        del problem


if __name__ == "__main__":
    main("speed", check)
