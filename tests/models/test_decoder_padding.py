"""Padding and packed documents: the decoder computes each document as if it were alone."""

import re

import pytest
import torch
from torch import Tensor

from maxmoe.models import Decoder
from support.small_decoder import make, tokens_like


def logits_of(model: Decoder, *documents: Tensor) -> list[Tensor]:
    return [model(document.unsqueeze(0)).logits[0] for document in documents]


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return make().double()


def test_padding_changes_nothing_before_between_or_after(model: Decoder) -> None:
    tokens = tokens_like(model)
    mask = torch.rand(tokens.shape) < 0.6
    mask[:, 0] = False  # left padding
    logits = model(tokens, mask).logits
    garbage = torch.where(mask, tokens, -100)
    assert torch.equal(model(garbage, mask).logits[mask], logits[mask])
    assert logits.isfinite().all()


def test_packed_documents_are_computed_one_by_one(model: Decoder) -> None:
    """With padding; gradients are of a sum over separate documents, without the auxiliary loss of the batch."""
    documents = tokens_like(model).flatten()[:6].split([3, 2, 1])
    separate = logits_of(model, *documents)
    parameters = dict(model.named_parameters())
    loss = torch.stack([logits.square().sum() for logits in separate]).sum()
    expected = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    packed = torch.cat((documents[0], torch.tensor([0]), *documents[1:])).unsqueeze(0)
    mask = torch.tensor([[True, True, True, False, True, True, True]])
    ids = torch.tensor([[7, 7, 7, 7, 3, 3, 9]])
    logits = model(packed, mask, ids).logits[mask]
    torch.testing.assert_close(logits, torch.cat(separate), rtol=1e-12, atol=1e-13)
    gradients = torch.autograd.grad(logits.square().sum(), list(parameters.values()), allow_unused=True)
    for name, ours, theirs in zip(parameters, gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_mask": torch.ones(2, 3).bool()}, "token_mask must have the shape of tokens (2, 4), got (2, 3)"),
        ({"token_mask": torch.ones(2, 4)}, "token_mask must be bool, got torch.float32"),
        ({"document_ids": torch.zeros(4).long()}, "document_ids must have the shape of tokens (2, 4), got (4,)"),
        ({"document_ids": torch.zeros(2, 4)}, "document_ids must be integer, got torch.float32"),
    ],
)
def test_what_is_refused(model: Decoder, options: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model(torch.zeros(2, 4, dtype=torch.int64), **options)
