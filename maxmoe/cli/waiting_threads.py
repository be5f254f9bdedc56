"""How the threads of libgomp, the OpenMP library of torch on Linux, wait for each other, and what would help."""

import os
from collections.abc import Mapping
from pathlib import Path

SPIN_COUNT = "GOMP_SPINCOUNT"
RECOMMENDED_SPIN_COUNT = 1000  # some ten microseconds: about the time between two operators of a layer

# Longest bounded spin: above it, a thread that waits for one without a processor takes a processor from others.
_LONGEST_SPIN_COUNT = 10_000


def describe_waiting(environment: Mapping[str, str], *, num_threads: int, load: float, num_processors: int) -> str:
    """Describe how threads wait at the end of an operator, and what to set on a busy machine.

    `load` is the mean number of processes that want one of `num_processors`, this process's threads included.
    """
    if num_threads == 1:
        return "not for each other: there is one thread"
    policy, count = environment.get("OMP_WAIT_POLICY", "").lower(), environment.get(SPIN_COUNT, "")
    if count.isdecimal() and int(count) <= _LONGEST_SPIN_COUNT:
        return f"spin {count} times, then sleep"
    if policy == "passive" and not count:
        return "sleep at once"
    busy = f", and {load:.1f} processes want {num_processors} processors" if load > num_processors else ""
    return (
        f"spin for milliseconds{busy}: beside other processes, set {SPIN_COUNT}={RECOMMENDED_SPIN_COUNT} before torch "
        "is imported"
    )


def waiting_of_this_process(num_threads: int) -> str:
    """Describe how the threads of torch wait in this process."""
    try:
        uses_libgomp = "libgomp" in Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        uses_libgomp = False
    if not uses_libgomp:
        return "unknown: torch does not use libgomp"
    processors = len(os.sched_getaffinity(0))
    return describe_waiting(os.environ, num_threads=num_threads, load=os.getloadavg()[0], num_processors=processors)
