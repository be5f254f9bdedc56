"""Activation checkpointing: the same gradients to the bit, and with `keep_routing` never a second routing."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import maxmoe
from maxmoe import MoE, MoEOutput
from maxmoe._torch import SELECTIVE_CHECKPOINT_OPTIONS
from maxmoe.recompute.selective import choices_are_kept
from support.moe_layers import COMPUTE, DEEPSEEK, LLAMA4, Options, make, outcome, tokens
from support.operator_calls import assert_same
from support.operator_checks import ExecutedOperators, compile_whole

WAYS: dict[str, Callable[..., Any]] = {
    "non_reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "keep_routing": partial(checkpoint, use_reentrant=False, context_fn=maxmoe.keep_routing),
}
LAYERS: dict[str, Options] = {
    "deepseek": DEEPSEEK,
    "llama4": LLAMA4,
    "random": {"router": "random", "load_balance_loss_weight": 0.3},
    "capacity": COMPUTE["capacity"],
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)


@each_way
@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gives_the_same_bits(path: str, dtype: torch.dtype, options: Options, way: Callable[..., Any]) -> None:
    """In a block, in which the routing is neither the first nor the last operator, and under autocast."""
    layer = make(dtype, **options)
    x = tokens(layer, 2, 9)

    def block(x: Tensor) -> MoEOutput:
        x = torch.tanh(x)
        output = layer(x)
        return output._replace(hidden_states=torch.sin(x + output.hidden_states))

    for autocast in (torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32), nullcontext()):
        with autocast:
            torch.manual_seed(3)
            expected = outcome(layer, x, block)
            torch.manual_seed(3)
            assert_same(outcome(layer, x, partial(way, block)), expected)


@each_layer
def test_saves_any_operator(options: Options) -> None:
    """The policies of users name operators of torch, whose outputs nothing may change in place then."""
    layer = make(**options)
    x = tokens(layer, 2, 9)
    torch.manual_seed(3)
    with ExecutedOperators() as executed:
        layer(x)
    torch.manual_seed(3)
    expected = outcome(layer, x)
    for saved in executed.times:

        def policy(context: Any, operator: Any, *_args: Any, saved: str = saved, **_options: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if str(operator) == saved else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        way = partial(checkpoint, use_reentrant=False, context_fn=contexts, **SELECTIVE_CHECKPOINT_OPTIONS)
        torch.manual_seed(3)
        with set_checkpoint_early_stop(False):  # something after the layer needs all of it
            assert_same(outcome(layer, x, lambda x, way=way: way(layer, x)), expected)


@each_way
@pytest.mark.parametrize("training", [True, False])
def test_a_mode_that_changes_before_the_backward(way: Callable[..., Any], training: bool) -> None:
    """A recomputation has the balance loss over the step, which an evaluation lacks, if its forward had it."""
    layer = make(load_balance_scope="step", load_balance_loss_weight=0.3)
    accumulator, first, x = maxmoe.StatsAccumulator(layer), tokens(layer), tokens(layer)

    def gradients(call: Callable[..., Any], *, changes: bool) -> list[Tensor]:
        outcome(layer.train(), first)  # the first micro-batch of the step
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        hidden_states, aux_loss, _ = call(layer.train(training), leaf)
        layer.train(training != changes)
        (hidden_states.square().sum() + aux_loss).backward()
        accumulator.update()
        return [leaf.grad, *(parameter.grad for parameter in layer.parameters())]

    expected = gradients(lambda layer, x: layer(x), changes=False)
    assert all(map(torch.equal, gradients(way, changes=True), expected))


@pytest.mark.parametrize(("name", "times"), [("non_reentrant", 2), ("reentrant", 2), ("keep_routing", 1)])
def test_how_often_it_routes(name: str, times: int) -> None:
    layer = make(**DEEPSEEK)
    with ExecutedOperators() as executed:
        outcome(layer, tokens(layer), lambda x: WAYS[name](layer, x))
    assert executed.times["maxmoe.route.default"] == times
    assert executed.times["maxmoe.ragged_plan.default"] == times
    # Routed and shared experts are always recomputed; without gradients they are one operator.
    experts = executed.times["maxmoe.expert_ffn_forward.default"] + executed.times["maxmoe.expert_ffn.default"]
    assert experts == 4


def one_expert_for_each_sign() -> MoE:
    """A token goes to expert 0 if its first entry is positive, to expert 1 if it is negative."""
    layer = make(num_experts=4, top_k=1, normalization="none", score_function="sigmoid")
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:2, 0] = torch.tensor([1.0, -1.0])
        layer.router.weight[2:, 0] = 0.0
    return layer


def test_keeps_the_experts_of_the_forward_when_the_recomputation_differs() -> None:
    layer = one_expert_for_each_sign()
    x = tokens(layer, 9)
    x[:, 0] = 0.01
    calls = []

    def unrepeatable(x: Tensor) -> MoEOutput:
        calls.append(len(calls))
        output: MoEOutput = layer(x - torch.tensor([0.02 * calls[-1], *[0.0] * 6]))
        return output

    assert layer(x).stats.tokens_per_expert.tolist() == [9, 0, 0, 0]
    expected = outcome(layer, x)
    got = outcome(layer, x, lambda x: WAYS["keep_routing"](unrepeatable, x))
    assert calls == [0, 1]
    for name in ("experts.gate_proj", "experts.up_proj", "experts.down_proj"):
        gradient = got.gradients[name]
        assert gradient is not None and gradient[0].any() and not gradient[1:].any()
    assert_same(got, expected, 0.2)  # up to the perturbation

    # Without keep_routing the other expert gets gradients of tokens that it has not computed.
    calls.clear()
    other = outcome(layer, x, lambda x: WAYS["non_reentrant"](unrepeatable, x)).gradients["experts.up_proj"]
    assert other is not None and other[1].any()


def test_the_choice_of_a_router_is_kept_and_its_scores_are_not() -> None:
    def choose(x: Tensor) -> Tensor:
        with choices_are_kept():
            scores = x.sigmoid()
            best = scores.argmax(1, keepdim=True)
        return scores.gather(1, best)

    x = torch.randn(8, 4, requires_grad=True)
    with ExecutedOperators() as executed:
        checkpoint(choose, x, use_reentrant=False, context_fn=maxmoe.keep_routing).sum().backward()
    assert (executed.times["aten.argmax.default"], executed.times["aten.sigmoid.default"]) == (1, 2)


def test_random_numbers_of_a_router_are_drawn_again() -> None:
    """If its random integers were kept, a recomputation would draw other numbers after them."""
    x = torch.ones(64, requires_grad=True)

    def noisy(x: Tensor) -> Tensor:
        with choices_are_kept():
            kept = torch.randint(2, x.shape)
        return x * (kept + torch.rand(x.shape))

    y = checkpoint(noisy, x, use_reentrant=False, context_fn=maxmoe.keep_routing)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y)


def test_compiles() -> None:
    layer = make(**DEEPSEEK)
    x = tokens(layer)
    compiled = compile_whole(lambda x: WAYS["keep_routing"](layer, x), "aot_eager")
    assert_same(outcome(layer, x, compiled), outcome(layer, x), 1e-13)
