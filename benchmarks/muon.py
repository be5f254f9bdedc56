"""A step of Muon on stacked experts, beside `torch.optim.Muon` on each matrix, and the layer that it trains.

Both orthogonalise gate, up and down of every expert, from the same gradients; the share is relative to a training step
of the layer alone: forward, backward and optimizer.
"""

import torch
from torch import nn

import maxmoe
from benchmarks.command import Benchmark, Session, main
from benchmarks.figures import time_panels
from benchmarks.problem import problem_of
from benchmarks.results import Case, Result, best_times, milliseconds, table, timing_report
from benchmarks.shapes import MUON
from benchmarks.timing import Runner
from maxmoe.optim import Muon, parameter_groups

OURS, THEIRS, LAYER = "maxmoe.optim.Muon", "torch.optim.Muon", "maxmoe.MoE, forward+backward"


def measure(session: Session, case: Case) -> None:
    """Time both optimizers with constant gradients, and the layer."""
    problem = problem_of(case)
    _, D, F, E, K = problem.shape
    config = maxmoe.MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=K)
    layer = maxmoe.MoE(config, dtype=problem.dtype)
    parameters = list(layer.parameters())

    def run_layer() -> object:
        return torch.autograd.grad(layer(problem.x).hidden_states, parameters, problem.cotangent)

    layer(problem.x).hidden_states.backward(problem.cotangent)
    singles = []
    for stack in layer.experts.parameters():
        for matrix, gradient in zip(stack.detach(), stack.grad, strict=True):
            singles.append(nn.Parameter(matrix.T.contiguous()))
            singles[-1].grad = gradient.T.contiguous()
    ours = Muon(parameter_groups(layer, {"router.*": "adamw"}), lr=1e-5)
    theirs = torch.optim.Muon(singles, lr=1e-5)
    runners = [
        Runner(OURS, ours.step, "maxmoe"),
        Runner(THEIRS, theirs.step, "alternative"),
        Runner(LAYER, run_layer, "part"),
    ]
    session.time(case, runners)


def summary(results: list[Result]) -> str:
    """The speedup, and the share of a training step."""
    rows = []
    for case, (ours, theirs, layer) in best_times(results, [OURS, THEIRS, LAYER]):
        ratios = [f"{theirs / ours:.2f}x", f"{ours / (ours + layer):.0%}"]
        rows.append([case.name, case.dtype_name, *map(milliseconds, (ours, theirs, layer)), *ratios])
    header = ["shape", "dtype", f"{OURS} ms", f"{THEIRS} ms", "layer ms", "faster", "share of the step"]
    return f"Summary: best of all calls\n{table(header, rows)}" if rows else ""


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary)


BENCHMARK = Benchmark("muon", __doc__, MUON, ["step"], measure, report, time_panels)

if __name__ == "__main__":
    main(BENCHMARK)
