"""One thread against --threads threads: experts, transformers' experts, and plain matrix products."""

import torch

from benchmarks.alternatives.dense_bound import DenseBound
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts
from benchmarks.alternatives.transformers_experts import TransformersExperts
from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import Contender, Mode, mode_of, runner
from benchmarks.figures import Bar, Panel, panels_by_mode
from benchmarks.problem import problem_of
from benchmarks.results import Case, Result, by_case, milliseconds, table, title
from benchmarks.shapes import TRAINING
from benchmarks.timing import Runner


def measure(session: Session, case: Case) -> None:
    """Time every contender with one thread and with all threads, in turn."""
    problem, mode = problem_of(case), mode_of(case)
    runners = []
    for contender in (MaxmoeExperts(), TransformersExperts("grouped_mm"), DenseBound(case.dtype)):
        contender.prepare(problem)
        runners += [with_threads(contender, mode, threads) for threads in (1, session.options.threads)]
    try:
        session.time(case, runners)
    finally:
        torch.set_num_threads(session.options.threads)


def with_threads(contender: Contender, mode: Mode, threads: int) -> Runner:
    """A runner of the contender that sets the number of threads."""
    timed = runner(contender, mode)
    change = timed.before

    def before() -> None:
        torch.set_num_threads(threads)
        if change is not None:
            change()

    return Runner(f"{contender.name}, threads {threads}", timed.call, timed.kind, before)


def pairs(group: list[Result]) -> dict[str, tuple[Result, Result]]:
    """Times with one thread and with all threads, by contender."""
    found = zip(group[::2], group[1::2], strict=False)
    return {single.contender.rpartition(",")[0]: (single, several) for single, several in found}


def report(results: list[Result]) -> str:
    """The tables."""
    parts = []
    for case, group in by_case(results).items():
        header = ["contender", "1 thread ms", "all threads ms", "speedup"]
        rows = [
            [name, milliseconds(single.best), milliseconds(several.best), f"{single.best / several.best:.2f}"]
            for name, (single, several) in pairs(group).items()
        ]
        if rows:
            parts.append(f"{title(case)}\n{table(header, rows)}")
    return "\n\n".join(parts)


def panels(results: list[Result]) -> list[Panel]:
    """Speedups."""
    bars = {
        case: [Bar(name, single.best / several.best, single.kind) for name, (single, several) in pairs(group).items()]
        for case, group in by_case(results).items()
        if pairs(group)
    }
    return panels_by_mode("speedup over one thread; longer is better", bars)


BENCHMARK = Benchmark("scaling", __doc__, TRAINING, ["forward+backward", "forward"], measure, report, panels)

if __name__ == "__main__":
    main(BENCHMARK)
