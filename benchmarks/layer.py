"""The whole layer: `maxmoe.MoE` against the blocks of transformers, with the same weights and tokens.

Training: output and the gradients of x, router, gate, up and down; the weights change before every step. Forward
only: weights unchanged. In 16 bits the routers of transformers round their logits to that dtype, ours does not: some
tokens see other experts, and the results are compared in float32 only.
"""

import math

import torch

from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE, Mode
from benchmarks.figures import time_panels
from benchmarks.layers import layer_contenders
from benchmarks.problem import make_problem
from benchmarks.results import Case, Result, summary_against_alternatives, timing_report
from benchmarks.shapes import TRAINING, Shape

MODES: list[Mode] = ["forward+backward", "forward"]


def measure(session: Session, case: Case) -> None:
    """All contenders in one case."""
    assert isinstance(case.shape, Shape)
    problem = make_problem(case.shape, case.dtype)
    mode = next(mode for mode in MODES if mode == case.mode)
    tolerance = TOLERANCE[case.dtype] if case.dtype in (torch.float32, torch.float64) else math.inf
    session.time(case, session.admit(case, [*layer_contenders()], problem, mode, tolerance))


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary_against_alternatives)


BENCHMARK = Benchmark("layer", __doc__, TRAINING, list(MODES), measure, report, time_panels)

if __name__ == "__main__":
    main(BENCHMARK)
