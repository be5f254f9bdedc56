"""Records of routing from the arrays of inference servers, and such arrays from records."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import maxmoe
from maxmoe.nn import RoutingRecord
from nn.replayed_layers import recorded
from support.moe_layers import make, tokens
from support.small_decoder import make as make_decoder
from support.small_decoder import tokens_like

NUM_TOKENS, NUM_LAYERS, TOP_K, NUM_EXPERTS = 10, 4, 3, 6
LAYERS = [None, "blocks.0.moe", "blocks.1.moe", None]  # a dense one, and one of multi-token prediction


def served() -> Tensor:
    """Ids ``(tokens, layers, K)`` that differ within a token, and zeros for layers without experts, as from vLLM."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, generator=generator)
    ids = scores.argsort(-1)[..., :TOP_K].to(torch.int32)
    ids[:, [0, 3]] = 0
    return ids


def test_the_tokens_of_a_request_are_one_sequence() -> None:
    ids = served()
    record = RoutingRecord.from_array(ids, LAYERS)
    assert list(record.calls) == LAYERS[1:3]
    for index, (of_layer,) in enumerate(record.calls.values(), 1):
        assert of_layer.dtype == torch.int32 and torch.equal(of_layer, ids[None, :, index])


@pytest.mark.parametrize("side", ["right", "left"])
def test_requests_become_a_padded_batch(side: Any) -> None:
    ids, ends = served(), [0, 4, 4, 10]
    record = RoutingRecord.from_array(ids, LAYERS, cu_seqlens=torch.tensor(ends), padding_side=side)
    for index, (of_layer,) in enumerate(record.calls.values(), 1):
        expected = torch.full((3, 6, TOP_K), -2, dtype=torch.int32)
        for sequence, (begin, end) in enumerate(pairwise(ends)):
            for place, token in enumerate(range(begin, end)):
                expected[sequence, place + (6 - end + begin if side == "left" else 0)] = ids[token, index]
        assert torch.equal(of_layer, expected)
    again = record.to_array(LAYERS, cu_seqlens=ends, padding_side=side, sentinel=0)
    assert torch.equal(again, ids)


def test_a_padded_batch_keeps_its_dims() -> None:
    ids = served().view(2, 5, NUM_LAYERS, TOP_K)
    ids[1, 3:] = 255  # padding
    record = RoutingRecord.from_array(ids, LAYERS, sentinel=255)
    assert torch.equal(record.calls["blocks.1.moe"][0], ids[:, :, 2].masked_fill(ids[:, :, 2] == 255, -1))
    array = record.to_array()
    assert torch.equal(array, ids[:, :, 1:3].masked_fill(ids[:, :, 1:3] == 255, -1)) and array.dtype == torch.int32


def test_arrays_of_numpy() -> None:
    """Read-only arrays, as received from a server, and arrays of narrow unsigned integers."""
    numpy = pytest.importorskip("numpy")
    ids = served()
    received = numpy.frombuffer(ids.numpy().tobytes(), dtype=numpy.int32).reshape(ids.shape)
    for array in (received, ids.numpy().astype(numpy.uint16), numpy.asfortranarray(ids.numpy())):
        record = RoutingRecord.from_array(array, LAYERS, cu_seqlens=numpy.array([0, 4, 10]))
        assert torch.equal(record.to_array(LAYERS, cu_seqlens=[0, 4, 10], sentinel=0), ids)


def test_generated_routes_are_replayed_from_an_array() -> None:
    """Routes of a generation, in an array of concatenated requests, are replayed in a forward over the sequences."""
    model = make_decoder()
    with maxmoe.record_routing(model) as record, torch.no_grad():
        sequences = model.generate(tokens_like(model, 2, 3), 4, temperature=0.0)
    ends = [0, 6, 12]
    array = record.joined().to_array(cu_seqlens=ends)
    assert array.shape == (12, len(record.calls), 2)
    read = RoutingRecord.from_array(array.numpy(), [*record.calls], cu_seqlens=ends)
    with maxmoe.record_routing(model) as again, maxmoe.replay_routing(model, read):
        model(sequences[:, :-1]).logits.sum().backward()
    for path, (ids,) in again.calls.items():
        assert torch.equal(ids, torch.cat(record.calls[path], dim=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids.mT, "experts must be integers of shape [tokens, layers (4), K] or [B, S, layers (4), K], got "
         "torch.int32 of shape (10, 3, 4)"),
        (lambda ids: ids[:, 1], "experts must be integers of shape [tokens, layers (4), K] or"),
        (lambda ids: ids.bool(), "experts must be integers of shape [tokens, layers (4), K] or [B, S, layers (4), K], "
         "got torch.bool of shape (10, 4, 3)"),
        (lambda ids: ids - 2, "the ids of blocks.0.moe must be at least 0 or the sentinel (-1), got -2"),
        (lambda ids: ids.long() + 2**32, "the ids of blocks.0.moe must be below 2**31, got 42949"),
        # The number of tokens or of experts per token equals the number of layers, so that the dims can be confused.
        (lambda ids: ids[:4, :, :1].expand(4, 4, 4).mT, "the experts of a token must differ, got ["),
        (lambda ids: ids.roll(1, 1), "the experts of a token must differ, got [0, 0, 0] for token [0] of blocks.0.moe"),
    ],
)  # fmt: skip
def test_other_arrays_are_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        RoutingRecord.from_array(change(served()), LAYERS)


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([None] * 4, {}, "layers must have the path of each MoE layer, got [None, None, None, None]"),
        (LAYERS, {"cu_seqlens": [0, 4, 9]}, "cu_seqlens up to 9 need experts of shape [9, layers, K], got (10, 4, 3)"),
        (LAYERS, {"cu_seqlens": [0, 11, 10]}, "cu_seqlens must rise from 0, one"),
        (LAYERS, {"cu_seqlens": [4, 10]}, "cu_seqlens must rise from 0, one"),
        (LAYERS, {"cu_seqlens": [[0, 10]]}, "cu_seqlens must rise from 0, one"),
        (LAYERS, {"cu_seqlens": [0, 10], "padding_side": "top"}, "padding_side must be 'right' or 'left', got 'top'"),
    ],
)
def test_other_arguments_are_refused(layers: list[str | None], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        RoutingRecord.from_array(served(), layers, **options)


def test_layers_that_share_a_bank_of_experts() -> None:
    """Two of three layers are one module: its path is there twice, with a call for each of them."""

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared = make(), make()

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.shared, self.first, self.shared):
                x = x + layer(x).hidden_states
            return x

    model, layers = Shared(), ["shared", "first", None, "shared"]
    x = tokens(model.first, 2, 5)
    record = recorded(model, x)
    array = record.to_array(layers)
    shared, (first,) = record.calls["shared"], record.calls["first"]
    assert all(torch.equal(array[:, :, index], ids) for index, ids in enumerate((shared[0], first)))
    assert torch.equal(array[:, :, 3], shared[1]) and not torch.equal(*shared) and (array[:, :, 2] == -1).all()
    read = RoutingRecord.from_array(array, layers)
    assert all(torch.equal(*pair) for pair in zip(read.calls["shared"], shared, strict=True))
    with maxmoe.record_routing(model) as again, maxmoe.replay_routing(model, read):
        model(x)
    assert torch.equal(again.to_array(layers), array)
    with pytest.raises(ValueError, match=r"^the layers of the record must have one call of the same shape for each "):
        record.to_array(["shared", "first"])
    with pytest.raises(ValueError, match=r"^the layers of the record must have the same number of calls, got"):
        record.joined()


def test_records_that_are_no_array_are_refused() -> None:
    layer = make()
    record = recorded(layer, tokens(layer, 2, 5))
    two = RoutingRecord({"": [*record.calls[""], *record.calls[""]]})
    other = RoutingRecord({"a": record.calls[""], "b": [record.calls[""][0][:1]]})
    with pytest.raises(ValueError, match=r"^the layers of the record must have one call of the same shape for each"):
        two.to_array()
    with pytest.raises(ValueError, match=r"^the layers of the record must have one call of the same shape"):
        other.to_array()
    with pytest.raises(ValueError, match=r"^layers must have all layers of the record \[''\], got \['a'\]$"):
        record.to_array(["a"])
    message = r"^cu_seqlens of a batch \(2, 4\) need ids of shape \(2, 4, 'K'\), got \(2, 5, 3\)$"
    with pytest.raises(ValueError, match=message):
        record.to_array(cu_seqlens=[0, 4, 8])
