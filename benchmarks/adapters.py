"""A training step of frozen experts with adapters of PEFT, against the step of the frozen experts alone.

The adapters have rank 8 and stand beside gate, up and down. A step computes the output and the gradients of x, of the
routing weights and of the adapters, which change before every step. Ratios are medians over rounds: in each of them,
all contenders take a step in turn. Peak: resident memory above the state before a step, with one process per contender.
"""

import statistics

from benchmarks.alternatives.peft_experts import adapter_contenders
from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE
from benchmarks.figures import time_panels
from benchmarks.peak import measure_apart
from benchmarks.problem import problem_of
from benchmarks.results import Case, Result, by_case, mebibytes, milliseconds, table, timing_report
from benchmarks.shapes import ADAPTERS

OURS, FROZEN, *OTHERS = [contender.name for contender in adapter_contenders()]


def measure(session: Session, case: Case) -> None:
    """Measure all contenders in one case: their times, then their memory."""
    before = len(session.results)
    runners = session.admit(case, problem_of(case), adapter_contenders(), TOLERANCE[case.dtype])
    session.time(case, runners)
    del runners
    for result in session.results[before:]:
        if result.seconds:
            result.numbers, result.absent = measure_apart(result.contender, case, session.options.threads)


def summary(results: list[Result]) -> str:
    """The cost of adapters beside frozen experts, and of PEFT's sum of weights and adapters relative to ours."""
    rows = []
    for case, group in by_case(results).items():
        of = {result.contender: result for result in group}
        if not of.keys() >= {OURS, FROZEN}:
            continue
        times = [milliseconds(statistics.median(of[name].seconds)) for name in (FROZEN, OURS)]
        others = [f"{median_ratio(of[name], of[OURS]):.2f}" if name in of else "" for name in OTHERS]
        peaks = [
            mebibytes(of[name].numbers["peak"]) if name in of and of[name].numbers else ""
            for name in (FROZEN, OURS, *OTHERS)
        ]
        rows.append([case.name, case.dtype_name, *times, f"{median_ratio(of[OURS], of[FROZEN]):.2f}", *others, *peaks])
    header = ["shape", "dtype", "frozen ms", "adapters ms", "adapters / frozen"]
    header += [f"{name} / adapters" for name in OTHERS]
    header += [f"peak MiB: {name}" for name in ("frozen", "adapters", *OTHERS)]
    return f"Summary: medians\n{table(header, rows)}" if rows else ""


def median_ratio(one: Result, other: Result) -> float:
    """The median over rounds of the ratio of their times."""
    return statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=False))


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary)


BENCHMARK = Benchmark("adapters", __doc__, ADAPTERS, ["forward+backward"], measure, report, time_panels)

if __name__ == "__main__":
    main(BENCHMARK)
