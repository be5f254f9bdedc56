"""The whole layer: `maxmoe.MoE` against the blocks of transformers, with the same weights and tokens.

Training: output and the gradients of x, router, gate, up and down; the weights change before every step. Forward
only: weights unchanged. In 16 bits the routers of transformers round their logits to that dtype, ours does not: some
tokens see other experts, and the results are compared in float32 only.
"""

import math

import torch

from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE
from benchmarks.figures import time_panels
from benchmarks.layers import layer_contenders
from benchmarks.results import Case, Result, summary_against_alternatives, timing_report
from benchmarks.shapes import TRAINING


def measure(session: Session, case: Case) -> None:
    """All contenders in one case."""
    tolerance = TOLERANCE[case.dtype] if case.dtype in (torch.float32, torch.float64) else math.inf
    session.time(case, session.admit(case, layer_contenders(), tolerance))


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary_against_alternatives)


BENCHMARK = Benchmark("layer", __doc__, TRAINING, ["forward+backward", "forward"], measure, report, time_panels)

if __name__ == "__main__":
    main(BENCHMARK)
