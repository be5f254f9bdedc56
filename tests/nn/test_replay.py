"""Recorded and replayed routing: the recorded experts, with weights and gradients of the current parameters."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import maxmoe
from maxmoe.models import Decoder
from maxmoe.nn import RoutingRecord
from support.moe_layers import COMPUTE, Options, each_compute, each_family, make, tokens
from support.replayed_layers import moved, recorded
from support.small_decoder import make as make_decoder
from support.small_decoder import tokens_like


@each_family
def test_replaying_with_the_same_parameters_changes_nothing(options: Options) -> None:
    layer = make(**{"load_balance_loss_weight": 0.1, **options})
    x = tokens(layer)
    expected = layer(x)
    with maxmoe.replay_routing(layer, recorded(layer, x)):
        got = layer(x)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got.aux_loss, expected.aux_loss, rtol=1e-12, atol=0)
    assert torch.equal(got.stats.tokens_per_expert, expected.stats.tokens_per_expert)


@each_compute
@each_family
def test_experts_are_those_of_the_record_and_weights_live(options: Options, compute: Options) -> None:
    before = make(**options, **compute)
    after, x = moved(before), tokens(before)
    record = recorded(before, x)
    with maxmoe.record_routing(after) as again, maxmoe.replay_routing(after, record):
        after(x)
    (ids,), (replayed,) = record.calls[""], again.calls[""]
    assert torch.equal(ids, replayed)
    assert not torch.equal(ids, recorded(after, x).calls[""][0])
    routing = after.router(x.flatten(0, 1), experts=ids.flatten(0, 1).long())
    # The scores of the current router for the recorded experts, expert by expert.
    for token, chosen in enumerate(routing.experts):
        scores = {
            "softmax": routing.logits[token].softmax(-1),
            "sigmoid": 1 / (1 + torch.exp(-routing.logits[token])),
            "identity": routing.logits[token],
        }[after.config.score_function][chosen]
        expected = {"none": scores, "sum": scores / scores.sum(), "softmax": scores.softmax(-1)}
        weights = expected[after.config.normalization] * after.config.routed_scaling_factor
        torch.testing.assert_close(routing.weights[token], weights, rtol=1e-12, atol=1e-15)


@each_family
def test_the_gradient_of_the_router_is_that_with_the_experts_fixed(options: Options) -> None:
    """Against central differences of the loss, with the ids of the record."""
    layer = moved(before := make(hidden_size=3, intermediate_size=2, **options))
    x = tokens(layer, 1, 3)
    record, weight = recorded(before, x), layer.router.weight

    def loss() -> Tensor:
        with maxmoe.replay_routing(layer, record):
            output = layer(x)
        return output.hidden_states.sin().sum() + output.aux_loss

    (gradient,) = torch.autograd.grad(loss(), weight)
    step, expected = 1e-6, torch.empty_like(gradient)
    with torch.no_grad():
        for entry in range(weight.numel()):
            values = []
            for sign in (1, -1):
                weight.view(-1)[entry] += sign * step
                values.append(loss())
                weight.view(-1)[entry] -= sign * step
            expected[entry // 3, entry % 3] = (values[0] - values[1]) / (2 * step)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)


# A warning of torch that is hidden unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_that_was_compiled_before() -> None:
    """Compiled code does not depend on hooks; paths do not contain the names of wrappers."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(moved(before := make()))
    records = [recorded(torch.nn.Sequential(before), tokens(before)) for _ in range(2)]
    compiled = torch.compile(torch.nn.Sequential(model[0]), backend="eager", dynamic=False)
    x = tokens(before)
    own = recorded(model, x)
    compiled(x)
    for record in records:
        with maxmoe.record_routing(compiled) as again, maxmoe.replay_routing(compiled, record):
            got = compiled(x).hidden_states
        with maxmoe.replay_routing(model, record):
            expected = model(x).hidden_states
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)
        assert again.calls.keys() == {"0"} and torch.equal(again.calls["0"][0], record.calls["0"][0])
        assert torch.equal(recorded(compiled, x).calls["0"][0], own.calls["0"][0])


def test_generation_followed_by_training() -> None:
    """The experts of every generated token, in one forward over the sequences."""
    model: Decoder = make_decoder()
    with maxmoe.record_routing(model) as record, torch.no_grad():
        sequences = model.generate(tokens_like(model, 2, 3), 4, temperature=0.0)
    assert len(record) == 4
    with maxmoe.record_routing(model) as again, maxmoe.replay_routing(model, record.joined()):
        model(sequences[:, :-1]).logits.sum().backward()
    for path, (ids,) in again.calls.items():
        assert torch.equal(ids, torch.cat(record.calls[path], dim=1))
        assert ids.shape == (2, 6, 2)


def test_calls_join_along_the_sequence() -> None:
    layer, x = make(), tokens(make(), 2, 5)
    with maxmoe.record_routing(layer) as record:
        for position in range(5):
            layer(x[:, position : position + 1])
    assert torch.equal(record.joined().calls[""][0], recorded(layer, x).calls[""][0])


def test_padding_is_recorded_and_replayed() -> None:
    layer = moved(before := make())
    x, mask = tokens(layer), torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0]]).bool()
    record = recorded(before, x, mask)
    assert torch.equal(record.calls[""][0] == -2, ~mask.unsqueeze(-1).expand(2, 5, 3))
    with maxmoe.replay_routing(layer, record):
        masked = layer(x, mask)
    with maxmoe.replay_routing(layer, record):
        unmasked = layer(x)
    assert torch.equal(masked.hidden_states, unmasked.hidden_states)
    assert torch.equal(masked.stats.tokens_per_expert, unmasked.stats.tokens_per_expert)


@each_family
def test_tokens_without_a_route(options: Options) -> None:
    """A cached prefix, of which a server reports no route: an error, what the router selects now, or nothing."""
    layer = moved(before := make(**{**options, "num_shared_experts": 0, "shared_expert_gate": False}))
    x = tokens(before).requires_grad_()
    ids = recorded(before, x).calls[""][0].int()
    ids[:, :2] = ids[1, 4, 0] = -1  # a single slot is not a route
    record = RoutingRecord.from_array(ids.unsqueeze(2), [""])
    message = "call 1 of the layer has no route for 4 of 10 tokens, first for token [0, 0]: missing='natural' lets the"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"), maxmoe.replay_routing(layer, record):
        layer(x)
    completed = torch.where((ids < 0).all(-1, keepdim=True), recorded(layer, x).calls[""][0], ids)
    with maxmoe.replay_routing(layer, RoutingRecord({"": [completed]})):
        expected = layer(x)
    with maxmoe.record_routing(layer) as again, maxmoe.replay_routing(layer, record, missing="natural"):
        natural = layer(x)
    assert torch.equal(again.calls[""][0].int().clamp_min(-1), completed)
    assert torch.equal(natural.hidden_states, expected.hidden_states) and expected.hidden_states[:, :2].all()
    inputs = (x, *layer.parameters())
    gradients = [torch.autograd.grad(output.hidden_states.sin().sum(), inputs) for output in (natural, expected)]
    assert all(torch.equal(got, right) for got, right in zip(*gradients, strict=True))
    padding = torch.arange(5).expand(2, 5) < 2
    with maxmoe.replay_routing(layer, record, missing="zero"):
        zero = layer(x)
    assert not zero.hidden_states[:, :2].any()
    with maxmoe.replay_routing(layer, record):  # no error for padding
        masked = layer(x, ~padding)
    for output in (zero, masked):
        torch.testing.assert_close(output.hidden_states[:, 2:], expected.hidden_states[:, 2:], rtol=1e-12, atol=1e-13)


def test_a_record_is_saved_and_loaded(tmp_path: Path) -> None:
    model = make_decoder()
    record = recorded(model, tokens_like(model))
    record.save(tmp_path / "record.pt")
    loaded = RoutingRecord.load(tmp_path / "record.pt")
    assert loaded.calls.keys() == record.calls.keys()
    assert all(torch.equal(loaded.calls[path][0], ids) for path, (ids,) in record.calls.items())
    (first, (ids,)), *_ = record.calls.items()
    assert repr(record[:1]).startswith(f"RoutingRecord({first!r}: 1 calls {[*ids.shape]}")  # without the ids
    assert len(repr(record)) < 100 * len(record.calls)
    torch.save({"layer": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(
        ValueError, match=r"other\.pt must be a record of routing: lists of tensors by the paths of layers"
    ):
        RoutingRecord.load(tmp_path / "other.pt")


def test_hooks_are_gone_afterwards() -> None:
    layer, x = make(), tokens(make())
    record = recorded(layer, x)
    layer(x)
    assert len(record) == 1
    with pytest.raises(RuntimeError, match="stop"), maxmoe.replay_routing(layer, record):
        raise RuntimeError("stop")
    layer(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda ids: ids[..., :2],
            "the ids of the layer must be integers of shape [..., S, top_k (3)], got torch.int16 of shape",
        ),
        (
            lambda ids: ids.float(),
            "the ids of the layer must be integers of shape [..., S, top_k (3)], got torch.float32 of",
        ),
        (lambda ids: ids + 1, "the ids of the layer must be in [-2, num_experts (6)), got from 1 to 6"),
        (lambda ids: ids > 2, "the ids of the layer must be integers of shape [..., S, top_k (3)], got torch.bool of"),
        (lambda ids: ids[:1], "call 1 of the layer has tokens of shape (2, 5), the record (1, 5)"),
        (lambda ids: ids.transpose(0, 1), "call 1 of the layer has tokens of shape (2, 5), the record (5, 2)"),
        (lambda ids: ids.flatten(0, 1), "call 1 of the layer has tokens of shape (2, 5), the record (10,)"),
    ],
)
def test_other_ids_are_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    layer = make()
    x = tokens(layer)
    ids = torch.arange(30).remainder(6).view(2, 5, 3).to(torch.int16)
    record = RoutingRecord({"": [change(ids)]})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"), maxmoe.replay_routing(layer, record):
        layer(x)


def test_other_layers_and_other_numbers_of_calls_are_refused() -> None:
    layer, x = make(), tokens(make())
    record = recorded(layer, x)
    with (
        pytest.raises(ValueError, match=r"^missing must be one of error, natural, zero, got None$"),
        maxmoe.replay_routing(layer, record, missing=None),  # type: ignore[arg-type]
    ):
        pass
    message = "the record must have the layers of the model: missing ['0'], unexpected ['']"
    with (
        pytest.raises(ValueError, match=f"^{re.escape(message)}$"),
        maxmoe.replay_routing(torch.nn.Sequential(layer), record),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"^the record has 1 calls of the layer, got another one$"),
        maxmoe.replay_routing(layer, record),
    ):
        layer(x), layer(x)
    with (
        pytest.raises(ValueError, match=r"^the record has 1 calls of the layer, got 0$"),
        maxmoe.replay_routing(layer, record),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"^Linear has no maxmoe.MoE layers, and no blocks of transformers with "),
        maxmoe.record_routing(torch.nn.Linear(2, 2)),
    ):
        pass


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("compute", [COMPUTE["sparse"], COMPUTE["dense"], COMPUTE["capacity"]], ids=str)
def test_no_tokens_are_recorded_and_replayed(compute: Options, shape: tuple[int, int], tmp_path: Path) -> None:
    layer = make(**compute)
    x = torch.zeros(*shape, layer.config.hidden_size, dtype=torch.float64)
    record = recorded(layer, x)
    assert record.calls[""][0].shape == (*shape, layer.config.top_k)
    record.save(tmp_path / "record.pt")
    with (
        maxmoe.record_routing(layer) as again,
        maxmoe.replay_routing(layer, RoutingRecord.load(tmp_path / "record.pt")),
    ):
        assert layer(x).hidden_states.shape == x.shape
    assert again.calls[""][0].shape == record.calls[""][0].shape
    with maxmoe.record_routing(layer) as record:
        layer(x), layer(tokens(layer, shape[0], 3))
    assert record.joined().calls[""][0].shape == (shape[0], shape[1] + 3, layer.config.top_k)
