"""Padding: a layer with a token mask against the reference, and against the layer on the valid tokens alone."""

import dataclasses
import re
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE
from support.moe_layers import (
    COMPUTE,
    FAMILIES,
    Options,
    assert_meets_specification,
    each_compute,
    each_family,
    make,
    outcome,
    tokens,
)
from support.operator_calls import assert_same
from support.pairwise import pairwise

LOSSES: Options = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
MASKS = {
    "tail": torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool(),
    "scattered": torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1], [0, 0, 1, 1, 1, 0]]).bool(),
    "an empty sequence": torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]]).bool(),
    "none": torch.zeros(3, 6).bool(),
    "all": torch.ones(3, 6).bool(),
}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
SCOPES = ["sequence", "batch"]


def padded(layer: MoE, mask: Tensor) -> Tensor:
    """Tokens with NaN and infinities in the padding."""
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e300], dtype=torch.float64)
    x = tokens(layer, *mask.shape)
    return torch.where(mask.unsqueeze(-1), x, bad.repeat(9)[: x.shape[-1]].to(x.dtype))


@pytest.mark.parametrize(("family", "scope", "compute", "mask"), pairwise([[*FAMILIES], SCOPES, [*COMPUTE], [*MASKS]]))
def test_meets_the_specification(family: str, scope: str, compute: str, mask: str) -> None:
    layer = make(**{**FAMILIES[family], **LOSSES, **COMPUTE[compute]}, load_balance_scope=scope)
    assert_meets_specification(layer, padded(layer, MASKS[mask]), token_mask=MASKS[mask])


@each_mask
@pytest.mark.parametrize("compute", [COMPUTE["sparse"], COMPUTE["dense"]], ids=["sparse", "dense"])
@each_family
def test_is_the_layer_on_the_valid_tokens_alone(options: Options, compute: Options, mask: Tensor) -> None:
    layer = make(**{**options, **LOSSES, **compute}, load_balance_scope="batch")
    x = padded(layer, mask)
    got, alone = outcome(layer, x, token_mask=mask), outcome(layer, x[mask])
    assert torch.equal(got.outputs[0][~mask], torch.zeros_like(x[~mask]))
    expected = dataclasses.replace(
        alone,
        outputs=(torch.zeros_like(x).masked_scatter(mask.unsqueeze(-1), alone.outputs[0]), *alone.outputs[1:]),
    )
    for ours, theirs in zip(got.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@each_mask
@each_compute
def test_padding_gets_no_gradient_and_passes_none_on(compute: Options, mask: Tensor) -> None:
    layer = make(**{**FAMILIES["deepseek"], **LOSSES, **compute}, expert_bias=True)
    x = padded(layer, mask).requires_grad_()
    output = layer(x, mask)
    # The upstream gradient of padding is NaN, too.
    worst = torch.where(mask.unsqueeze(-1), 1.0, float("nan")).to(x.dtype).expand_as(output.hidden_states)
    torch.autograd.backward((output.hidden_states, output.aux_loss), (worst, torch.ones_like(output.aux_loss)))
    assert x.grad is not None and torch.equal(x.grad[~mask], torch.zeros_like(x.grad[~mask]))
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_padding_counts_in_no_statistic() -> None:
    layer, mask = make(**LOSSES), MASKS["scattered"]
    x = padded(layer, mask)
    stats, alone = layer(x, mask).stats, layer(x[mask]).stats
    assert torch.equal(stats.tokens_per_expert, alone.tokens_per_expert)
    assert int(stats.tokens_per_expert.sum()) == int(mask.sum()) * layer.config.top_k
    torch.testing.assert_close(stats.router_entropy, alone.router_entropy, rtol=1e-13, atol=0)
    assert int(stats.dropped) == 0


def test_a_sequence_balances_over_its_own_tokens() -> None:
    layer, mask = make(load_balance_loss_weight=1.0, load_balance_scope="sequence"), MASKS["an empty sequence"]
    x = padded(layer, mask)
    alone = [layer(x[b][mask[b]]).aux_loss for b in (0, 2)]
    torch.testing.assert_close(layer(x, mask).aux_loss, torch.stack(alone).mean(), rtol=1e-13, atol=0)


@pytest.mark.sampled(1)
@each_compute
def test_recomputation_and_compilation(compute: Options) -> None:
    torch._dynamo.reset()
    layer, mask = make(**{**FAMILIES["deepseek"], **LOSSES, **compute}), MASKS["scattered"]
    x = tokens(layer, *mask.shape)
    expected = outcome(layer, x, token_mask=mask)
    for options in ({}, {"context_fn": maxmoe.keep_routing}):
        recompute = partial(checkpoint, layer, use_reentrant=False, **options)
        assert_same(outcome(layer, x, recompute, mask), expected, 0)
    assert_same(outcome(layer, x, torch.compile(layer, fullgraph=True, backend="aot_eager"), mask), expected, 1e-12)


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (torch.ones(2, 5), "torch.float32 of shape (2, 5)"),
        (torch.ones(2, 4).bool(), "torch.bool of shape (2, 4)"),
        (torch.ones(10).bool(), "torch.bool of shape (10,)"),
    ],
)
def test_other_masks_are_refused(mask: Tensor, got: str) -> None:
    layer = make()
    with pytest.raises(ValueError, match=f"^token_mask must be bool of shape \\(2, 5\\), got {re.escape(got)}$"):
        layer(tokens(layer), mask)
