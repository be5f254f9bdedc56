"""Recorded and replayed routing: the recorded experts, with weights and gradients of the current parameters."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxmoe
from maxmoe.nn import RoutingRecord
from nn.replayed_layers import moved, recorded
from support.moe_layers import COMPUTE, FAMILIES, Options, each_family, make, tokens
from support.small_decoder import make as make_decoder
from support.small_decoder import tokens_like


@pytest.mark.parametrize("compute", ["sparse", "capacity"])
@each_family
def test_experts_are_those_of_the_record_and_weights_live(options: Options, compute: str) -> None:
    before = make(**options, **COMPUTE[compute])
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
        logits = routing.logits[token]
        every = {"softmax": logits.softmax(-1), "sigmoid": 1 / (1 + torch.exp(-logits)), "identity": logits}
        scores = every[after.config.score_function][chosen]
        expected = {"none": scores, "sum": scores / scores.sum(), "softmax": scores.softmax(-1)}
        weights = expected[after.config.normalization] * after.config.routed_scaling_factor
        torch.testing.assert_close(routing.weights[token], weights, rtol=1e-12, atol=1e-15)


def test_padding_is_recorded_and_replayed() -> None:
    layer = moved(before := make())
    x, mask = tokens(layer), torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0]]).bool()
    record = recorded(before, x, mask)
    assert torch.equal(record.calls[""][0] == -2, ~mask.unsqueeze(-1).expand(2, 5, 3))
    outputs = []
    for arguments in ((x, mask), (x,)):
        with maxmoe.replay_routing(layer, record):
            outputs.append(layer(*arguments))
    assert torch.equal(outputs[0].hidden_states, outputs[1].hidden_states)
    assert torch.equal(outputs[0].stats.tokens_per_expert, outputs[1].stats.tokens_per_expert)


@pytest.mark.parametrize("name", ["plain", "gpt_oss", "longcat_flash"])
def test_tokens_without_a_route(name: str) -> None:
    """A cached prefix, of which a server reports no route: an error, what the router selects now, or nothing."""
    layer = moved(before := make(**FAMILIES[name]))
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
    with maxmoe.replay_routing(layer, record, missing="zero"):
        zero = layer(x)
    assert not zero.hidden_states[:, :2].any()
    with maxmoe.replay_routing(layer, record):  # no error for padding
        masked = layer(x, torch.arange(5).expand(2, 5) >= 2)
    for output in (zero, masked):
        torch.testing.assert_close(output.hidden_states[:, 2:], expected.hidden_states[:, 2:], rtol=1e-12, atol=1e-13)


def test_a_record_is_saved_and_loaded(tmp_path: Path) -> None:
    model = make_decoder()
    record = recorded(model, tokens_like(model))
    record.save(tmp_path / "record.pt")
    loaded = RoutingRecord.load(tmp_path / "record.pt")
    assert loaded.calls.keys() == record.calls.keys()
    assert all(torch.equal(loaded.calls[path][0], ids) for path, (ids,) in record.calls.items())
    assert len(repr(record)) < 100 * len(record.calls)  # without the ids
    torch.save({"layer": torch.zeros(3)}, tmp_path / "other.pt")
    message = r"other\.pt must be a record of routing: lists of tensors by the paths of layers"
    with pytest.raises(ValueError, match=message):
        RoutingRecord.load(tmp_path / "other.pt")


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
def test_no_tokens_are_recorded_and_replayed(shape: tuple[int, int]) -> None:
    layer, x = make(), torch.zeros(*shape, 7, dtype=torch.float64)
    record = recorded(layer, x)
    with maxmoe.record_routing(layer) as again, maxmoe.replay_routing(layer, record):
        assert layer(x).hidden_states.shape == x.shape
    assert again.calls[""][0].shape == record.calls[""][0].shape == (*shape, 3)


OF_SHAPE = "the ids of the layer must be integers of shape [..., S, top_k (3)], got"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids[..., :2], f"{OF_SHAPE} torch.int16 of shape"),
        (lambda ids: ids.float(), f"{OF_SHAPE} torch.float32 of"),
        (lambda ids: ids > 2, f"{OF_SHAPE} torch.bool of"),
        (lambda ids: ids + 1, "the ids of the layer must be in [-2, num_experts (6)), got from 1 to 6"),
        (lambda ids: ids[:1], "call 1 of the layer has tokens of shape (2, 5), the record (1, 5)"),
        (lambda ids: ids.transpose(0, 1), "call 1 of the layer has tokens of shape (2, 5), the record (5, 2)"),
        (lambda ids: ids.flatten(0, 1), "call 1 of the layer has tokens of shape (2, 5), the record (10,)"),
    ],
)
def test_other_ids_are_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    layer = make()
    ids = torch.arange(30).remainder(6).view(2, 5, 3).to(torch.int16)
    record = RoutingRecord({"": [change(ids)]})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"), maxmoe.replay_routing(layer, record):
        layer(tokens(layer))


def test_other_layers_and_other_numbers_of_calls_are_refused() -> None:
    layer, x = make(), tokens(make())
    record = recorded(layer, x)
    layer(x)
    assert len(record) == 1

    def replayed(num_calls: int, model: nn.Module = layer, **options: Any) -> None:
        with maxmoe.replay_routing(model, record, **options):
            for _ in range(num_calls):
                layer(x)

    def refused(message: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            replayed(*arguments, **options)

    refused("missing must be one of error, natural, zero, got None", 0, missing=None)
    layers = "the record must have the layers of the model: missing ['0'], unexpected ['']"
    refused(layers, 0, nn.Sequential(layer))
    refused("the record has 1 calls of the layer, got another one", 2)
    refused("the record has 1 calls of the layer, got 0", 0)
    with pytest.raises(RuntimeError, match="stop"), maxmoe.replay_routing(layer, record):
        raise RuntimeError("stop")
    layer(x)  # its hooks are gone
    message = r"^Linear has no maxmoe.MoE layers, and no blocks of transformers with "
    with pytest.raises(ValueError, match=message), maxmoe.record_routing(nn.Linear(2, 2)):
        pass
