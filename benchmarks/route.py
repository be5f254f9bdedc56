"""Routing in groups, as in DeepSeek-V3: the share of `route` and `ragged_plan` in the layer's time, with backward.

The layer has sigmoid scores, a correction bias, and takes each token's experts from 4 of 8 groups. Beside it the
whole router, which is `route` and the product that makes the logits, and the router of transformers for that model.
"""

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

import maxmoe
from benchmarks.command import Benchmark, Session, main
from benchmarks.figures import time_panels
from benchmarks.problem import Problem, problem_of
from benchmarks.results import Case, Result, best_times, milliseconds, table, timing_report
from benchmarks.shapes import ROUTE
from benchmarks.timing import Runner
from maxmoe.ops import ragged_plan, route

NUM_GROUPS, TOP_K_GROUPS = 8, 4
LAYER, ROUTING = "maxmoe.MoE", "route + ragged_plan"


def make_layer(problem: Problem) -> maxmoe.MoE:
    """The layer, with the router of the problem."""
    _, D, F, E, K = problem.shape
    config = maxmoe.MoEConfig(
        hidden_size=D,
        intermediate_size=F,
        num_experts=E,
        top_k=K,
        score_function="sigmoid",
        score_correction_bias=True,
        num_groups=NUM_GROUPS,
        top_k_groups=TOP_K_GROUPS,
    )
    layer = maxmoe.MoE(config, dtype=problem.dtype)
    with torch.no_grad():
        layer.router.weight.copy_(problem.router)
    return layer


def make_theirs(problem: Problem) -> nn.Module:
    """The router of transformers, with the same weights."""
    _, D, _, E, K = problem.shape
    config = DeepseekV3Config(
        hidden_size=D,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=NUM_GROUPS,
        topk_group=TOP_K_GROUPS,
        routed_scaling_factor=1.0,
    )
    router: nn.Module = DeepseekV3TopkRouter(config)
    router.weight = nn.Parameter(problem.router.clone())
    return router


def measure(session: Session, case: Case) -> None:
    """Time the layer and its routing."""
    problem = problem_of(case)
    _, _, _, num_experts, top_k = problem.shape
    layer, theirs = make_layer(problem), make_theirs(problem)
    x = problem.x.clone().requires_grad_()
    with torch.no_grad():
        routing = layer.router(x)
    logits = routing.logits.requires_grad_()
    of_weights = torch.randn_like(routing.weights)
    bias = layer.router.score_correction_bias

    def run_layer() -> object:
        output = layer(x).hidden_states
        return torch.autograd.grad(output, [x, *layer.parameters()], problem.cotangent)

    def run_routing() -> object:
        weights, experts, _ = route(
            logits,
            top_k,
            score_function="sigmoid",
            correction_bias=bias,
            num_groups=NUM_GROUPS,
            top_k_groups=TOP_K_GROUPS,
        )
        plan = ragged_plan(experts, num_experts, num_rows=experts.numel())
        return plan, torch.autograd.grad(weights, logits, of_weights)

    def run_router(weights: Tensor, router: nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(weights, [x, router.weight], of_weights.to(weights.dtype))

    runners = [
        Runner(LAYER, run_layer, "maxmoe"),
        Runner(ROUTING, run_routing, "maxmoe"),
        Runner("maxmoe router", lambda: run_router(layer.router(x).weights, layer.router), "maxmoe"),
        Runner("DeepseekV3TopkRouter", lambda: run_router(theirs(x)[1], theirs), "alternative"),
    ]
    session.time(case, runners)


def summary(results: list[Result]) -> str:
    """The share of the layer's time."""
    rows = []
    for case, (layer, routing) in best_times(results, [LAYER, ROUTING]):
        rows.append([case.name, case.dtype_name, *map(milliseconds, (layer, routing)), f"{routing / layer:.1%}"])
    header = ["shape", "dtype", "layer ms", f"{ROUTING} ms", "share of the layer"]
    return f"Summary: best of all calls\n{table(header, rows)}" if rows else ""


def report(results: list[Result]) -> str:
    """The tables."""
    return timing_report(results, summary)


BENCHMARK = Benchmark("route", __doc__, ROUTE, ["forward+backward"], measure, report, time_panels)

if __name__ == "__main__":
    main(BENCHMARK)
