"""The whole layer: `maxmoe.MoE` against the blocks of transformers, with the same weights and tokens.

Training: output and the gradients of x, router, gate, up and down; the weights change before every step. Forward
only: weights unchanged. In 16 bits the routers of transformers round their logits, the router of maxmoe does not: some
tokens select other experts, so that results are compared in float32 only. The experts alone, with the routing given,
are timed beside the layer: the rest of its time is spent on router, losses and statistics.
"""

import math

import torch

from benchmarks.command import Benchmark, Session, main
from benchmarks.contender import TOLERANCE
from benchmarks.figures import time_panels
from benchmarks.layers import ExpertsAlone, MaxmoeLayer, layer_contenders
from benchmarks.problem import problem_of
from benchmarks.results import (
    Case,
    Result,
    best_times,
    milliseconds,
    summary_against_alternatives,
    table,
    timing_report,
)
from benchmarks.shapes import TRAINING


def measure(session: Session, case: Case) -> None:
    """Time all contenders in one case."""
    tolerance = TOLERANCE[case.dtype] if case.dtype in (torch.float32, torch.float64) else math.inf
    everybody = [*layer_contenders(), ExpertsAlone()]
    session.time(case, session.admit(case, problem_of(case), everybody, tolerance))


def summary_of_parts(results: list[Result]) -> str:
    """The share of the layer's time in its experts, and the remaining time."""
    rows = []
    for case, (layer, experts) in best_times(results, [MaxmoeLayer.name, ExpertsAlone.name]):
        shares = [f"{experts / layer:.2f}", f"{1 - experts / layer:.1%}"]
        rows.append([case.name, case.dtype_name, case.mode, *map(milliseconds, (layer, experts)), *shares])
    header = ["shape", "dtype", "mode", "whole layer ms", "experts alone ms", "experts alone / whole layer"]
    return f"Parts of the layer\n{table([*header, 'router, losses, statistics'], rows)}" if rows else ""


def summary(results: list[Result]) -> str:
    """Against alternatives, and in parts."""
    return "\n\n".join(filter(None, [summary_against_alternatives(results), summary_of_parts(results)]))


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary)


BENCHMARK = Benchmark("layer", __doc__, TRAINING, ["forward+backward", "forward"], measure, report, time_panels)

if __name__ == "__main__":
    main(BENCHMARK)
