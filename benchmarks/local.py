"""Local experts: time and memory of a step for an eighth of the experts, with all tokens.

This is the work of one of eight ranks. Of the eight blocks of experts, the one whose share of the rows is closest to an
eighth is measured. The cost should be proportional to the rows: the shares of time and of buffers (peak memory above
the state before, without results) are compared with the share of the rows.
"""

import torch

from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts
from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import runner
from benchmarks.figures import Bar, Panel, panels_by_mode
from benchmarks.peak import measure_apart
from benchmarks.problem import Problem, problem_of
from benchmarks.results import Case, Result, absent_lines, by_case, mebibytes, milliseconds, table, title
from benchmarks.shapes import LOCAL

PARTS = 8


def typical_block(problem: Problem) -> tuple[int, int, int]:
    """Number of experts in a block, its first one, and its rows."""
    num_experts = problem.shape.num_experts
    count = max(num_experts // PARTS, 1)
    load = problem.experts.flatten().bincount(minlength=num_experts)
    rows = load.unfold(0, count, count).sum(1)
    block = int((rows - problem.shape.num_rows / PARTS).abs().argmin())
    return count, block * count, int(rows[block])


def measure(session: Session, case: Case) -> None:
    """Measure all experts, and a block of them."""
    problem = problem_of(case)
    count, first, num_rows = typical_block(problem)
    runners = []
    for name, contender in {"all": MaxmoeExperts(), "local": MaxmoeExperts(count, first)}.items():
        contender.prepare(problem)
        timed = runner(contender, "forward+backward")
        timed.name = f"{name} experts"
        runners.append(timed)
    start = len(session.results)
    session.time(case, runners)
    for result, local, rows in zip(
        session.results[start:], (None, (count, first)), (problem.shape.num_rows, num_rows), strict=True
    ):
        numbers, reason = measure_apart("maxmoe", case, torch.get_num_threads(), local)
        result.numbers = {"rows": rows, **numbers}
        result.absent = reason


def shares(group: list[Result]) -> dict[str, float]:
    """The shares of rows, time and buffers of the local experts."""
    everything, local = group
    rows, buffers, peak = (local.numbers[name] / everything.numbers[name] for name in ("rows", "buffers", "peak"))
    return {"rows": rows, "time": local.best / everything.best, "buffers": buffers, "peak": peak}


def measured(results: list[Result]) -> dict[Case, list[Result]]:
    """Cases with all their numbers."""
    groups = by_case(results, lambda result: result.seconds and "peak" in result.numbers)
    return {case: group for case, group in groups.items() if len(group) == 2}


def report(results: list[Result]) -> str:
    """The tables."""
    parts = []
    for case, group in measured(results).items():
        rows = [
            [
                result.contender,
                str(result.numbers["rows"]),
                milliseconds(result.best),
                *(mebibytes(result.numbers[name]) for name in ("buffers", "peak")),
            ]
            for result in group
        ]
        part = shares(group)
        rows.append(["share", *(f"{share:.3f}" for share in part.values())])
        rows.append(["share / share of rows", *(f"{share / part['rows']:.2f}" for share in part.values())])
        header = ["maxmoe", "rows", "best ms", "buffers MiB", "peak MiB with results"]
        parts.append(f"{title(case)}\n{table(header, rows)}")
    return "\n\n".join(filter(None, [*parts, absent_lines(results)]))


def panels(results: list[Result]) -> list[Panel]:
    """The shares."""
    bars = {
        case: [Bar(name, part * PARTS, "bound" if name == "rows" else "maxmoe") for name, part in shares(group).items()]
        for case, group in measured(results).items()
    }
    return panels_by_mode("share of the local experts / an eighth", bars)


BENCHMARK = Benchmark("local", __doc__, LOCAL, ["forward+backward"], measure, report, panels)

if __name__ == "__main__":
    main(BENCHMARK)
