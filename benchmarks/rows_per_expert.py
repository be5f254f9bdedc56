"""Time per row against rows per expert, from decoding to training, beside both bounds.

Every expert has the same number of rows, from 1 to 512: the number of tokens of a shape is set accordingly. The
contenders are maxmoe in both layouts and the fast alternatives; `python -m benchmarks.experts --help` describes their
results and the bounds. Where the curves of the bounds cross, the experts have enough rows to be bound by FLOPs.
"""

from benchmarks import curves
from benchmarks.alternatives.bandwidth_bound import BandwidthBound
from benchmarks.alternatives.dense_bound import DenseBound
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts, MaxmoeLinearLayout
from benchmarks.alternatives.torch_grouped_mm import TorchGroupedMM
from benchmarks.alternatives.transformers_experts import TransformersExperts
from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE
from benchmarks.figures import Curves
from benchmarks.problem import balanced, problem_of
from benchmarks.results import Case, Result, absent_lines, bound_of
from benchmarks.shapes import AnyShape, B, Shape

ROWS_PER_EXPERT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


def points(shape: AnyShape, mode: str) -> list[Shape]:
    """The shape with the fewest tokens that give at least each number of rows per expert."""
    assert isinstance(shape, Shape)
    num_slots = [rows * shape.num_experts for rows in ROWS_PER_EXPERT]
    return [shape._replace(num_tokens=-(-number // shape.top_k)) for number in num_slots]


def measure(session: Session, case: Case) -> None:
    """Time all contenders with one number of rows."""
    alternatives = [TorchGroupedMM(), TransformersExperts("grouped_mm")]
    everybody = [MaxmoeExperts(), MaxmoeLinearLayout(), *alternatives, DenseBound(case.dtype), BandwidthBound()]
    session.time(case, session.admit(case, balanced(problem_of(case)), everybody, TOLERANCE[case.dtype]))


def rows_per_expert(case: Case) -> float:
    """The size that varies."""
    assert isinstance(case.shape, Shape)
    return case.shape.num_rows / case.shape.num_experts


def microseconds_per_row(result: Result) -> float:
    """The measured number: time per row."""
    assert isinstance(result.case.shape, Shape)
    return result.best / result.case.shape.num_rows * 1e6


def larger_bound(group: list[Result]) -> dict[str, float]:
    """The larger of the two bounds, relative to maxmoe."""
    bound = bound_of(group, group[0].case.dtype_name)
    ours = [result for result in group if result.kind == "maxmoe"]
    return {f"larger bound / {each.contender}": bound / each.best for each in ours} if bound else {}


AXES = curves.Axes("rows per expert", rows_per_expert, "µs per row", microseconds_per_row, "log", larger_bound)


def report(results: list[Result]) -> str:
    """The tables."""
    return "\n\n".join(filter(None, [curves.tables(results, AXES), absent_lines(results)]))


def panels(results: list[Result]) -> list[Curves]:
    """The curves."""
    return curves.panels(results, AXES)


BENCHMARK = Benchmark(
    "rows_per_expert", __doc__, {"B": B}, ["forward", "forward+backward"], measure, report, panels, points=points
)

if __name__ == "__main__":
    main(BENCHMARK)
