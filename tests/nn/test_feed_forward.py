"""MoEFeedForward: a tensor in, a tensor out, and the gradients of the training loss plus the auxiliary loss."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEFeedForward, set_aux_loss_scale
from maxmoe.families.zaya import RouterMLP
from support.moe_layers import DEEPSEEK, LOSSES, ZAYA, make, tokens
from support.operator_calls import Result, assert_same
from support.operator_checks import compile_whole

SCALE = 0.25
# A warning of torch.compile about its own code, for any torch.autograd.Function.
compiles = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def drop_in(layer: MoE) -> MoEFeedForward:
    """The same layer with a tensor as its output."""
    block = MoEFeedForward(layer.config, dtype=layer.router.weight.dtype)
    block.load_state_dict(layer.state_dict(), strict=True)
    block.aux_loss_scale = SCALE
    return block


def gradients(module: nn.Module, x: Tensor, forward: Callable[[Tensor], Any], times: int = 1) -> Result:
    """Gradients of a loss with an upstream gradient that is not constant, accumulated over `times` backwards."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    for _ in range(times):
        output = forward(x)
        hidden_states, aux_loss = output[:2] if isinstance(output, tuple) else (output, 0.0)
        (hidden_states.sin().sum() + SCALE * aux_loss).backward()
    leaves = {"x": x, **dict(module.named_parameters())}
    return Result((hidden_states.detach(),), {name: leaf.grad for name, leaf in leaves.items()})


WAYS: dict[str, Callable[[MoEFeedForward], Callable[..., Tensor]]] = {
    "called": lambda block: block,
    "checkpoint": lambda block: partial(checkpoint, block, use_reentrant=False),
    "reentrant": lambda block: partial(checkpoint, block, use_reentrant=True),
    "keep_routing": lambda block: partial(checkpoint, block, use_reentrant=False, context_fn=maxmoe.keep_routing),
    "compiled": lambda block: compile_whole(block, "aot_eager"),
    "compiled_checkpoint": lambda block: compile_whole(partial(checkpoint, block, use_reentrant=False), "aot_eager"),
    "changed_in_place": lambda block: lambda x, mask: block(x, mask).mul_(1.0),
}


@compiles
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way == "compiled")) for way in WAYS])
def test_gradients_are_those_of_the_sum(way: str) -> None:
    layer = make(**DEEPSEEK)
    x, block = tokens(layer, 2, 5), drop_in(layer)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    x[~mask] = torch.nan
    call = WAYS[way](block)
    expected = gradients(layer, x, lambda x: layer(x, mask), times=2)
    assert_same(gradients(block, x, lambda x: call(x, mask), times=2), expected, 1e-13)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_scaled_losses_and_micro_batches(as_tensor: bool) -> None:
    """set_aux_loss_scale gets GradScaler's scale / number of micro-batches, as Megatron's MoEAuxLossAutoScaler does."""
    layer = make(torch.float32, **{**DEEPSEEK, "load_balance_loss_weight": 30.0})
    block, batches = drop_in(layer), [tokens(layer, 2, 5) for _ in range(4)]
    sum((layer(x).hidden_states.sin().mean() + layer(x).aux_loss) / 4 for x in batches).backward()
    optimizer, scaler = torch.optim.SGD(block.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    factor = scaler.scale(torch.tensor(1 / 4))
    set_aux_loss_scale(nn.Sequential(block), factor if as_tensor else factor.item())
    for x in batches:
        scaler.scale(block(x).sin().mean() / 4).backward()
    scaler.unscale_(optimizer)
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(parameter.grad, layer.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@compiles
def test_other_scales_do_not_compile_again() -> None:
    block, compilations = drop_in(make(**DEEPSEEK)), []
    compiled = compile_whole(block, lambda graph, _: compilations.append(graph) or graph.forward)
    x = tokens(block)
    for scale in (0.5, 1.0, 3.0):
        set_aux_loss_scale(block, torch.tensor(scale))
        expected = gradients(block, x, block)
        assert_same(gradients(block, x, compiled), expected, 1e-13)
    assert len(compilations) == 1


def test_without_losses_or_gradients_nothing_is_added() -> None:
    block = drop_in(make())
    x = tokens(block)
    assert torch.equal(gradients(block, x, block).outputs[0], block(x))
    with torch.no_grad():
        assert not drop_in(make(**DEEPSEEK))(x).requires_grad
    frozen = drop_in(make(**DEEPSEEK)).requires_grad_(False)
    assert not frozen(x).requires_grad


def test_with_a_state_of_the_router() -> None:
    """The state is the second element; it has the gradient of the next layer, which takes it."""
    layers = [
        make(**{**ZAYA, **LOSSES, "router": RouterMLP(hidden_size=4, takes_state=takes)}) for takes in (False, True)
    ]
    blocks = [drop_in(layer) for layer in layers]
    maxmoe.set_aux_loss_scale(nn.ModuleList(blocks), 1.0)
    x, y = (tokens(layers[0], 3, 8).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    one = layers[0](x)
    two = layers[1](x + one.hidden_states, None, one.router_state)
    loss = one.aux_loss + two.aux_loss + two.router_state.sum()
    ((x + one.hidden_states + two.hidden_states).square().sum() + loss).backward()
    out, state = blocks[0](y)
    after, state = blocks[1](y + out, None, state)
    ((y + out + after).square().sum() + state.sum()).backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_model_without_the_layer_has_no_scale() -> None:
    with pytest.raises(ValueError, match=r"^Sequential must have layers of type MoEFeedForward, got none$"):
        set_aux_loss_scale(nn.Sequential(make()), 0.5)
