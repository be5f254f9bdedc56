"""The parts of the benchmarks: the clock, what the contenders compute, and what is counted."""

import json
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import maxmoe
from maxmoe import reference

pytest.importorskip("transformers")
from benchmarks import experts, local, peak, ragged, shapes, timing
from benchmarks.alternatives import contenders
from benchmarks.alternatives.dense_bound import DenseBound, bounds
from benchmarks.contender import TOLERANCE, AutogradContender, Contender, Mode, disagreement, runner
from benchmarks.layers import layer_contenders
from benchmarks.problem import Problem, make_problem
from benchmarks.timing import Runner, round_robin

# The optional libraries want multiples of 32.
SHAPE = shapes.Shape(num_tokens=7, hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """On a busy machine two threads wait for each other most of the time."""
    torch.set_num_threads(1)


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, ""

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if seconds:
            self.log += "z"
            self.now += seconds

    def takes(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.log += name
            self.now += seconds

        return call


def test_contenders_are_timed_in_turn_and_each_round_starts_with_another() -> None:
    clock = Clock()
    runners = [Runner(name, clock.takes(name, seconds)) for name, seconds in {"a": 1, "b": 2, "c": 0.5}.items()]
    assert list(round_robin(runners, 3, clock=clock, sleep=clock.sleep)) == [1, 2, 3]
    assert clock.log == "abc" + "abc" + "bca" + "cab"
    assert [each.seconds for each in runners] == [[1] * 3, [2] * 3, [0.5] * 3]
    assert [each.rounds for each in runners] == [3, 3, 3]


def test_what_comes_before_a_call_and_after_a_turn_is_not_timed() -> None:
    clock = Clock()
    one = Runner("a", clock.takes("a", 1), before=clock.takes("-", 7), settle_seconds=0.06)
    list(round_robin([one], 2, clock=clock, sleep=clock.sleep))
    assert clock.log == "-az-az-az"
    assert one.seconds == pytest.approx([1, 1])


def test_short_calls_have_many_in_a_turn_and_slow_ones_few_rounds() -> None:
    clock = Clock()
    per_turn, slow = timing.SECONDS_PER_TURN, timing.SECONDS_PER_CONTENDER
    seconds = {
        "short": per_turn / 5.5,
        "shortest": per_turn / 1e6,
        "slow": slow,
        "slower": 3 * slow,
        "fair": slow / 4.5,
    }
    runners = [Runner(name, clock.takes("", time)) for name, time in seconds.items()]
    list(round_robin(runners, 6, clock=clock, sleep=clock.sleep))
    calls = {each.name: (len(each.seconds), each.rounds) for each in runners}
    most = 6 * timing.MAX_CALLS_PER_TURN
    assert calls == {"short": (30, 6), "shortest": (most, 6), "slow": (2, 2), "slower": (2, 2), "fair": (4, 4)}


def expected_results(problem: Problem) -> dict[str, Tensor]:
    """Output and gradients, in loops and float64."""
    names = ("x", "weights", "gate", "up", "down")
    leaves = [getattr(problem, name).double().requires_grad_() for name in names]
    x, weights, gate, up, down = leaves
    plan = reference.ragged_plan(problem.experts, problem.shape.num_experts)
    output = reference.expert_ffn(x, weights, plan, gate, up, down)
    gradients = torch.autograd.grad(output, leaves, problem.cotangent.double())
    return {"output": output, **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize("mode", experts.MODES)
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
    problem = make_problem(SHAPE, torch.bfloat16)
    for contender in contenders():
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
    of_one_product = 2 * T * K * D * F
    for dtype in (torch.float32, torch.bfloat16):
        bound = DenseBound(dtype)
        bound.prepare(make_problem(SHAPE, dtype))
        for call, products in ((bound.forward, 3), (bound.step, 9)):
            with FlopCounterMode(display=False) as counter:
                call()
            assert counter.get_total_flops() == products * of_one_product
    assert [bound.name for bound in bounds(torch.bfloat16)] == ["bound: mm bfloat16", "bound: mm float32"]
    assert len(bounds(torch.float32)) == 1


def test_the_problem_is_skewed_and_its_weights_exact() -> None:
    problem = make_problem(shapes.B, torch.bfloat16)
    load = problem.experts.flatten().bincount(minlength=64).float()
    logits = torch.randn(2048, 64) + torch.linspace(1.5, 0, 64)
    skewed = logits.topk(8).indices.flatten().bincount(minlength=64).float()
    assert float((load - skewed).norm() / skewed.norm()) < 0.1
    assert torch.equal(problem.weights, problem.weights.bfloat16().float())


def test_maxmoe_saves_what_the_formula_says() -> None:
    request = json.dumps(["maxmoe", list(SHAPE), "float32", "forward+backward", 1, None])
    numbers = peak.answer(request)
    T, D, F, _, K = SHAPE
    assert numbers["saved"] == 4 * T * (D + 2 * K * F)
    # slots, rows and weights: int64, int64 and float32; sizes of the groups
    assert numbers["saved_indices"] <= T * K * (8 + 8 + 4) + 8 * SHAPE.num_experts


class Spends(AutogradContender):
    """Needs a buffer of 64 MiB, returns 48 MiB and saves two tensors of x's size."""

    def __init__(self) -> None:
        self.leaves = {"x": torch.ones(7, 3, requires_grad=True), "weights": torch.ones(1)}

    def forward(self) -> Tensor:
        output = torch.ones(48 * 2**20, dtype=torch.uint8)
        torch.ones(64 * 2**20, dtype=torch.uint8)
        return output

    def compute(self) -> Tensor:
        return self.leaves["x"].sin().exp()


def test_peak_and_saved_bytes_of_a_known_function() -> None:
    numbers = peak.peak(Spends(), "forward")
    assert numbers["returned"] == 48 * 2**20
    assert numbers["buffers"] == pytest.approx(64 * 2**20, abs=3 * 2**20)
    assert numbers["kept"] < 3 * 2**20
    assert peak.saved_for_backward(Spends()) == {"saved": 2 * 4 * 21, "saved_indices": 0}


def test_local_experts_are_a_typical_block() -> None:
    problem = make_problem(shapes.B, torch.float32)
    count, first, num_rows = local.typical_block(problem)
    chosen = (problem.experts >= first) & (problem.experts < first + count)
    assert (count, first % 8, int(chosen.sum())) == (8, 0, num_rows)
    assert num_rows / problem.experts.numel() == pytest.approx(1 / 8, abs=0.02)


def test_bytes_to_move() -> None:
    inputs = ragged.make_inputs(shapes.RowsShape(20, 5), torch.bfloat16)
    assert len(inputs.rows) == 16  # whole groups of 8
    assert ragged.bytes_to_move("ragged_gather", inputs) == 16 * 5 * 2 * 2 + 16 * 12
    assert ragged.bytes_to_move("ragged_gather_reduce", inputs) == 16 * 5 * 2 + 2 * 5 * 2 + 16 * 12
