"""The path of devices, run on the CPU: the experts through ATen against torch.nn.functional.grouped_mm by hand.

Both compute the products by the same operator of PyTorch, so that the difference is in the rest: plan, gather,
activation, weights, sum and their gradients. The times do not predict the speed of a GPU.
"""

from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts
from benchmarks.alternatives.maxmoe_through_aten import MaxmoeApartThroughAten, MaxmoeThroughAten
from benchmarks.alternatives.torch_grouped_mm import TorchGroupedMM
from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE
from benchmarks.figures import time_panels
from benchmarks.problem import problem_of
from benchmarks.results import Case, Result, summary_against_alternatives, timing_report
from benchmarks.shapes import A, B


def measure(session: Session, case: Case) -> None:
    """Time maxmoe in both layouts, grouped_mm by hand, and the CPU kernels."""
    everybody = [MaxmoeExperts(), MaxmoeThroughAten(), MaxmoeApartThroughAten(), TorchGroupedMM()]
    session.time(case, session.admit(case, problem_of(case), everybody, TOLERANCE[case.dtype]))


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary_against_alternatives)


BENCHMARK = Benchmark(
    "devices", __doc__, {"A": A, "B": B}, ["forward+backward", "forward"], measure, report, time_panels
)

if __name__ == "__main__":
    main(BENCHMARK)
