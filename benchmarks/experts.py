"""The experts alone: routing given, gather to weighted sum.

Training: output and all gradients (x, routing weights, gate, up, down); the weights change before every step.
Forward only: weights unchanged since the last call, and changed before every call. The bound is the same number of
multiplications and additions as plain matrix products; where torch has no fast product for a 16-bit dtype, the
bound in float32 beside it says what the machine can do.
"""

from benchmarks.alternatives import contenders
from benchmarks.alternatives.dense_bound import bounds
from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE, Mode
from benchmarks.figures import time_panels
from benchmarks.results import Case, Result, summary_against_alternatives, timing_report
from benchmarks.shapes import DECODING, TRAINING

MODES: list[Mode] = ["forward+backward", "forward", "forward, weights changed"]


def measure(session: Session, case: Case) -> None:
    """All contenders in one case."""
    # Few rows read many weights: products of one matrix are no bound for them.
    is_decoding = case.name in DECODING
    everybody = [*contenders(), *([] if is_decoding else bounds(case.dtype))]
    session.time(case, session.admit(case, everybody, TOLERANCE[case.dtype]))


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary_against_alternatives)


BENCHMARK = Benchmark(
    "experts", __doc__, TRAINING | DECODING, list(MODES), measure, report, time_panels, forward_only=DECODING
)

if __name__ == "__main__":
    main(BENCHMARK)
