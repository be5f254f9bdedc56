"""The experts alone: routing given, gather to weighted sum.

Training: output and all gradients (x, routing weights, gate, up, down); the weights change before every step.
Forward only: weights unchanged since the last call, and changed before every call. maxmoe takes part in both layouts:
row-major weights, and weights as published models store them.

--bound flops: the same number of multiplications and additions as plain matrix products; where torch has no fast
product for a 16-bit dtype, the bound in float32 beside it shows the speed of the machine. Left out for decoding, whose
few rows read many weights, so that products with one matrix do not bound them.
--bound bandwidth: the weights of the selected experts read once with `torch.sum`; with a backward pass, which needs
them after the output is complete, read twice, and the gradients of all weights written once with `fill_`. Rows are left
out. The summary compares with each, and with the larger of the two.

If the weights of all contenders do not fit into memory together, each contender allocates them when its turn begins and
frees them when it ends, in the same order of turns. Neither is timed, nor is the first call of such a turn.
"""

from benchmarks.alternatives import bounds, contenders
from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE, Mode
from benchmarks.figures import time_panels
from benchmarks.problem import problem_of
from benchmarks.results import Case, Result, summary_against_alternatives, timing_report
from benchmarks.shapes import DECODING, FORWARD_ONLY, TRAINING

MODES: list[Mode] = ["forward+backward", "forward", "forward, weights changed"]


def measure(session: Session, case: Case) -> None:
    """Time all contenders in one case."""
    names = [name for name in session.options.bound if name != "flops" or case.name not in FORWARD_ONLY]
    everybody = [*contenders(), *bounds(names, case.dtype)]
    session.time(case, session.admit(case, problem_of(case), everybody, TOLERANCE[case.dtype]))


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary_against_alternatives)


BENCHMARK = Benchmark(
    "experts", __doc__, TRAINING | DECODING, list(MODES), measure, report, time_panels, chooses_bounds=True
)

if __name__ == "__main__":
    main(BENCHMARK)
