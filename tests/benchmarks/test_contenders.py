"""The results of the contenders of the benchmarks, and what they compute and save."""

import os

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import maxmoe
from maxmoe import reference

pytest.importorskip("transformers")

from benchmarks import experts, shapes
from benchmarks.alternatives import contenders
from benchmarks.alternatives.dense_bound import DenseBound
from benchmarks.contender import TOLERANCE, AutogradContender, Contender, Mode, disagreement, runner
from benchmarks.layers import layer_contenders
from benchmarks.problem import Problem, make_problem
from support.slow_cases import by_default

# The optional libraries need multiples of 32.
SHAPE = shapes.Shape(num_tokens=7, hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """On a busy machine two threads wait for each other most of the time."""
    torch.set_num_threads(1)


def expected_results(problem: Problem) -> dict[str, Tensor]:
    """Output and gradients, in loops and float64."""
    names = ("x", "weights", "gate", "up", "down")
    leaves = [getattr(problem, name).double().requires_grad_() for name in names]
    x, weights, gate, up, down = leaves
    plan = reference.ragged_plan(problem.experts, problem.shape.num_experts)
    output = reference.expert_ffn(x, weights, plan, gate, up, down)
    gradients = torch.autograd.grad(output, leaves, problem.cotangent.double())
    return {"output": output, **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("mode", by_default(experts.MODES, ["forward+backward"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contender", contenders(), ids=lambda contender: contender.name)
def test_contenders_compute_the_experts(contender: Contender, dtype: torch.dtype, mode: Mode) -> None:
    problem = make_problem(SHAPE, dtype)
    if "jax" in contender.name:
        torch.set_num_threads(os.cpu_count() or 1)
    reason = contender.available(problem, mode)
    if reason is not None:
        assert contender.name.split()[0] not in ("maxmoe", "torch", "transformers")
        pytest.skip(reason)
    contender.prepare(problem)
    results, expected = contender.results(mode), expected_results(problem)
    assert set(results) == (set(expected) if mode == "forward+backward" else {"output"})
    for name, value in results.items():
        assert value.shape == expected[name].shape
        assert disagreement({name: value}, {name: expected[name]}, TOLERANCE[dtype]) is None


def test_contenders_see_weights_that_change() -> None:
    for contender in contenders():
        problem = make_problem(SHAPE, torch.bfloat16)
        if contender.available(problem, "forward") is None and "jax" not in contender.name:
            contender.prepare(problem)
            before = contender.forward().float()
            with torch.no_grad():
                list(contender.parameters())[-1].mul_(2)  # down: the output doubles
            runner(contender, "forward, weights changed").call()
            torch.testing.assert_close(contender.forward().float(), 2 * before, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("contender", layer_contenders(), ids=lambda contender: contender.name)
def test_layers_compute_the_layer(contender: AutogradContender) -> None:
    problem = make_problem(SHAPE, torch.float32)
    names = {"router": "router.weight"} | {name: f"experts.{name}_proj" for name in ("gate", "up", "down")}
    leaves = {name: getattr(problem, name).double().requires_grad_() for name in ("x", *names)}
    _, D, F, E, K = SHAPE
    config = maxmoe.MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=K)
    parameters = {full: leaves[name] for name, full in names.items()}
    output = reference.moe(leaves["x"], config, parameters)[0]
    gradients = torch.autograd.grad(output, list(leaves.values()), problem.cotangent.double())
    contender.prepare(problem)
    results = contender.results("forward+backward")
    expected = {"output": output, **dict(zip(leaves, gradients, strict=True))}
    assert set(results) == set(expected)
    assert disagreement(results, expected, TOLERANCE[torch.float32]) is None


def test_the_bound_has_the_products_of_the_experts() -> None:
    T, D, F, _, K = SHAPE
    bound = DenseBound(torch.float32)
    bound.prepare(make_problem(SHAPE, torch.float32))
    for call, products in ((bound.forward, 3), (bound.step, 9)):
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == products * 2 * T * K * D * F
