"""A router with hidden layers, whose state goes from layer to layer: values, gradients, recomputation, errors."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig, MoEFeedForward, ZeroComputation, record_routing, reference, replay_routing
from maxmoe.families.zaya import RouterMLP
from maxmoe.models import DecoderConfig
from support.moe_layers import SIZES, Options, assert_meets_specification, differentiate, each_compute, make, tokens
from support.operator_calls import Result, assert_same, cotangents_of
from support.operator_checks import compile_whole

LOSSES: Options = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
FIRST: Options = {
    "router": RouterMLP(hidden_size=4),
    "top_k": 1,
    "normalization": "none",
    "zero_computation": ZeroComputation(zero=1),
    "score_correction_bias": True,
    **LOSSES,
}
NEXT: Options = {**FIRST, "router": RouterMLP(hidden_size=4, takes_state=True)}


class Model(nn.Module):
    """Two layers, of which the second takes the state of the first."""

    def __init__(self, kind: type[MoE] = MoE, **options: Any) -> None:
        super().__init__()
        self.first, self.second = make(**FIRST, **options), make(**NEXT, **options)
        if kind is MoEFeedForward:
            self.first.__class__ = self.second.__class__ = kind

    def run(self, x: Tensor, token_mask: Tensor | None, layer: Any) -> tuple[Tensor, ...]:
        """Call both layers by `layer`, given a layer and its arguments."""
        out = layer(self.first, x, token_mask, None)
        after = layer(self.second, x + out.hidden_states, token_mask, out.router_state)
        return x + out.hidden_states + after.hidden_states, after.router_state, out.aux_loss + after.aux_loss


def directly(layer: MoE, *arguments: Any) -> Any:
    return layer(*arguments)


def outcome(model: Model, x: Tensor, layer: Any = directly, token_mask: Tensor | None = None) -> Result:
    """Outputs, without those of padding, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    outputs = model.run(x, token_mask, layer)
    if token_mask is not None:
        outputs = (outputs[0][token_mask], outputs[1][token_mask], outputs[2])
    return differentiate(outputs, {"x": x, **dict(model.named_parameters())}, cotangents_of(outputs))


def specification(model: Model, x: Tensor, got: Result, token_mask: Tensor | None = None) -> Result:
    state = {name: value.detach().requires_grad_() for name, value in model.state_dict().items()}
    x = x.detach().requires_grad_()
    first, second = (
        {name.removeprefix(f"{path}."): value for name, value in state.items() if name.startswith(path)}
        for path in ("first", "second")
    )
    out, loss, *_ = reference.moe(x, model.first.config, first, token_mask)
    before = model.first.router.rule.reference_state(x, first, None)
    after, next_loss, *_ = reference.moe(x + out, model.second.config, second, token_mask, before)
    last = model.second.router.rule.reference_state(x + out, second, before)
    hidden_states = x + out + after
    if token_mask is not None:
        hidden_states, last = hidden_states[token_mask], last[token_mask]
    return differentiate((hidden_states, last, loss + next_loss), {"x": x, **state}, cotangents_of(got.outputs))


@each_compute
def test_two_layers_meet_the_specification(path: str, compute: Options) -> None:
    model = Model(**compute)
    for shape in ((3, 6), (1,)):
        x = tokens(model.first, *shape)
        got = outcome(model, x)
        assert_same(got, specification(model, x, got), 1e-12)
    token_mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1]]).bool()
    x = tokens(model.first, 3, 6)
    got = outcome(model, x.masked_fill(~token_mask.unsqueeze(2), float("nan")), token_mask=token_mask)
    clean = x.masked_fill(~token_mask.unsqueeze(2), 0.0)
    assert_same(got, specification(model, clean, got, token_mask), 1e-12)


def test_the_first_layer_alone() -> None:
    assert_meets_specification(make(**{**FIRST, "top_k": 2, "router_bias": True}))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch.compile
def test_recomputed_compiled_and_replayed() -> None:
    model = Model()
    x = tokens(model.first, 3, 8)
    expected = outcome(model, x)
    for options in ({}, {"context_fn": maxmoe.keep_routing}):
        kept = partial(checkpoint, use_reentrant=False, **options)
        assert_same(outcome(model, x, kept), expected, 0.0)
    compiled = compile_whole(model.second, "aot_eager")
    both = {model.first: model.first, model.second: compiled}
    assert_same(outcome(model, x, lambda layer, *arguments: both[layer](*arguments)), expected, 1e-12)
    with record_routing(model) as record:
        outcome(model, x)
    with replay_routing(model, record):
        assert_same(outcome(model, x), expected, 1e-14)


def test_as_a_feed_forward_block() -> None:
    """The state is the second element, and the loss is in the gradients."""
    model, blocks = Model(), Model(MoEFeedForward)
    blocks.load_state_dict(model.state_dict())
    x, y = (tokens(model.first, 3, 8).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    hidden_states, state, loss = model.run(x, None, directly)
    (hidden_states.square().sum() + state.sum() + loss).backward()
    out, state = blocks.first(y)
    after, state = blocks.second(y + out, None, state)
    ((y + out + after).square().sum() + state.sum()).backward()
    torch.testing.assert_close(x.grad, y.grad)
    with torch.no_grad():
        assert torch.equal(blocks.second(y + out, None, blocks.first(y)[1])[1], state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_narrow_dtypes_and_bits(dtype: torch.dtype) -> None:
    layer = make(dtype, **{**NEXT, "hidden_size": 16, "router": RouterMLP(hidden_size=12, takes_state=True)})
    x, state = tokens(layer, 40), torch.randn(40, 12)
    got = layer(x, None, state)
    expected = layer.double()(x.double(), None, state.double())
    assert got.router_state.dtype == torch.float32
    assert (got.router_state - expected.router_state).norm() <= 1e-6 * expected.router_state.norm()
    layer.to(dtype)
    for begin, end in ((0, 1), (3, 10), (17, 40)):
        part = layer(x[begin:end], None, state[begin:end])
        assert torch.equal(part.hidden_states, got.hidden_states[begin:end])
        assert torch.equal(part.router_state, got.router_state[begin:end])


def test_initialization() -> None:
    state = make(**{**NEXT, "hidden_size": 300}).state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items() if name.startswith("router")}
    assert shapes["router.weight"] == (7, 4) and shapes["router.mlp.down_weight"] == (4, 300)
    layer = MoE(MoEConfig(**{**SIZES, **NEXT}))
    assert layer.router.mlp.state_scale.tolist() == [1.0] * 4 and not layer.router.mlp.fc1_bias.any()


WRONG: dict[str, tuple[Options, Any, str]] = {
    "missing": (NEXT, None, "router_state must be given to a layer whose router takes a state, got None"),
    "superfluous": (FIRST, torch.zeros(2, 5, 4), "must be None for a router that takes no state, got shape (2, 5, 4)"),
    "linear router": ({}, torch.zeros(2, 5, 4), "must be None for a router that takes no state"),
    "shape": (
        NEXT,
        torch.zeros(2, 4, 4),
        "of shape (2, 5, 4), the last dim the size of the state, got torch.float32 of",
    ),
    "dtype": (NEXT, torch.zeros(2, 5, 4).long(), "must be floating of shape (2, 5, 4)"),
}


@pytest.mark.parametrize(("options", "state", "message"), WRONG.values(), ids=WRONG)
def test_wrong_states(options: Options, state: Any, message: str) -> None:
    layer = make(**options)
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(tokens(layer), None, state)


def test_contradictions_are_refused() -> None:
    config = MoEConfig(**SIZES, router=RouterMLP(hidden_size=4))
    with pytest.raises(ValueError, match=r"must be a name with a custom router, got RouterMLP\(hidden_size=4"):
        MoE(config, router=nn.Linear(7, 6))
    with pytest.raises(ValueError, match=r"moe\.router must have no state, because the blocks pass no state"):
        DecoderConfig(vocab_size=8, hidden_size=7, num_layers=1, num_heads=1, head_dim=2, moe=config)
