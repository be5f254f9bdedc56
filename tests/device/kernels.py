"""The time of each kernel of the experts on a device.

    python -m device.kernels --device cuda --out results.json

Time and launches of each kernel, of ours and of `grouped_mm` by hand.
"""

from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from device import experts, speed
from device.cases import Cases, Values, main

CONTENDERS = ("ours", "ours, through ATen", "grouped_mm by hand", "grouped_mm by hand, in order")
NUM_CALLS = 3
NAME_LENGTH = 150  # the first characters of a mangled template name identify the kernel
SMALLEST_SHARE = 0.004  # kernels below are summed up


def profiled(cases: Cases, problem: experts.Problem, contender: str, *, backward: bool) -> Values:
    """Return time and number of launches for each kernel of a call; on the CPU, of each operator."""

    def call() -> None:
        experts.CONTENDERS[contender](problem, backward=backward)

    for _ in range(2):
        call()
    speed.synchronize(cases)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cases.is_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as trace:
        for _ in range(NUM_CALLS):
            call()
        speed.synchronize(cases)
    kind = torch.autograd.DeviceType.CUDA if cases.is_cuda else torch.autograd.DeviceType.CPU
    microseconds: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, int] = defaultdict(int)
    for event in trace.events():
        if event.device_type == kind:
            name = event.name[:NAME_LENGTH]
            microseconds[name] += (event.device_time if cases.is_cuda else event.self_cpu_time_total) / NUM_CALLS
            launches[name] += 1
    return summary(microseconds, {name: count / NUM_CALLS for name, count in launches.items()})


def summary(microseconds: dict[str, float], launches: dict[str, float]) -> Values:
    """Return totals, and the kernels by falling time; small ones are one entry."""
    total = sum(microseconds.values())
    kernels: list[dict[str, Any]] = []
    others = {"kernel": "others", "launches": 0.0, "us": 0.0}
    for name in sorted(microseconds, key=lambda name: -microseconds[name]):
        if microseconds[name] < SMALLEST_SHARE * total:
            others["launches"] += launches[name]
            others["us"] += microseconds[name]
        else:
            kernels.append({"kernel": name, "launches": launches[name], "us": round(microseconds[name], 1)})
    others["us"] = round(others["us"], 1)
    return {"us": round(total, 1), "launches": sum(launches.values()), "kernels": [*kernels, others]}


def check(cases: Cases) -> None:
    """Profile the experts."""
    for name, shape in (speed.TINY if cases.is_tiny else speed.SHAPES).items():
        problem = experts.draw(shape, torch.bfloat16, cases.device)
        for mode, backward in speed.MODES.items():
            for contender in CONTENDERS:
                group = f"{name}: {mode}"
                cases.run(group, contender, profiled, problem, contender, backward=backward)
        del problem


if __name__ == "__main__":
    main("kernels", check)
