"""Memory of the experts: the tensors that a training step saves for its backward pass, and its peak.

Saved: the tensors that the graph of autograd keeps alive, without parameters, in elements of the dtype per token.
maxmoe should save D + 2KF: x and the preactivations. The indices and the weights of the routing are counted separately.
Peak: resident memory above the state before the step. Returned: the output and the gradients, which every contender
allocates; not all of them may exist when memory is at its peak. Kept: memory that remains after all results are freed.
Each contender runs in its own process.
"""

from benchmarks.alternatives import contenders
from benchmarks.alternatives.kt_kernel import KtKernel
from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import mode_of
from benchmarks.figures import Bar, Panel, panels_by_mode
from benchmarks.peak import measure_apart
from benchmarks.problem import problem_of
from benchmarks.results import Case, Result, absent_lines, baseline_of, by_case, mebibytes, table, title
from benchmarks.shapes import TRAINING, Shape


def measure(session: Session, case: Case) -> None:
    """Measure all contenders in one case."""
    everybody = contenders()
    problem, mode = problem_of(case), mode_of(case)
    for contender in everybody:
        numbers: dict[str, float] = {}
        reason = contender.available(problem, mode)
        if isinstance(contender, KtKernel):
            reason = reason or "has its buffers from before the first step"
        if reason is None:
            numbers, reason = measure_apart(contender.name, case, session.options.threads)
        session.results.append(Result(case, contender.name, contender.kind, numbers=numbers, absent=reason))
        session.bar.update(1 / len(everybody))


def measured(results: list[Result]) -> dict[Case, list[Result]]:
    """Cases with their numbers."""
    return by_case(results, lambda result: result.numbers)


def relative(result: Result, group: list[Result]) -> float:
    """The peak of a contender relative to maxmoe."""
    return result.numbers["peak"] / max(baseline_of(group).numbers["peak"], 4096)


def report(results: list[Result]) -> str:
    """The tables."""
    parts = []
    for case, group in measured(results).items():
        header = ["contender", "peak MiB", "peak / maxmoe", "returned MiB", "peak - returned MiB", "kept MiB"]
        trains = case.mode == "forward+backward"
        if trains:
            header += ["saved elements/token", "D + 2KF", "indices, weights bytes/token"]
        rows = [
            [
                result.contender,
                mebibytes(result.numbers["peak"]),
                f"{relative(result, group):.2f}",
                *(mebibytes(result.numbers[name]) for name in ("returned", "buffers", "kept")),
                *(saved(result) if trains else []),
            ]
            for result in group
        ]
        parts.append(f"{title(case)}\n{table(header, rows)}")
    return "\n\n".join(filter(None, [*parts, absent_lines(results)]))


def saved(result: Result) -> list[str]:
    """The columns about tensors that are saved for backward."""
    if "saved" not in result.numbers:
        return ["", "", ""]
    shape = result.case.shape
    assert isinstance(shape, Shape)
    elements = result.numbers["saved"] / result.case.dtype.itemsize / shape.num_tokens
    formula = shape.hidden_size + 2 * shape.top_k * shape.intermediate_size
    return [f"{elements:.0f}", str(formula), f"{result.numbers['saved_indices'] / shape.num_tokens:.0f}"]


def panels(results: list[Result]) -> list[Panel]:
    """The peaks relative to maxmoe."""
    bars = {
        case: [Bar(result.contender, relative(result, group), result.kind) for result in group]
        for case, group in measured(results).items()
    }
    return panels_by_mode("peak memory / maxmoe; shorter is leaner", bars)


BENCHMARK = Benchmark(
    "memory", __doc__, TRAINING, ["forward+backward", "forward"], measure, report, panels, is_timed=False
)

if __name__ == "__main__":
    main(BENCHMARK)
