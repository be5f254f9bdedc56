"""The tokens of a batch that a rank has, also none, and means over the tokens of all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import maxmoe
from maxmoe.nn import LocalTokens, count_tokens
from maxmoe.parallel import parallelize, token_group, token_sharding
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding
from support.parallel_decoder import (
    BATCH,
    BLOCK,
    LENGTH,
    MeshRules,
    batch,
    decoder,
    layouts,
    loss,
    step_of_one_process,
    token_spec,
)
from support.parts import assert_same
from support.run_ranks import run_ranks


@pytest.mark.parametrize("layout", [*layouts(2), *layouts(4), *layouts(8)], ids=str)
def test_every_token_is_with_the_ranks_that_share_it(layout: MeshRules) -> None:
    mesh, rules = Mesh.planned(layout.sizes), LogicalRules.load(layout.rules)
    sharding = token_sharding(mesh, rules)
    assert sharding.shard_shape((BATCH, LENGTH)) == NamedSharding(mesh, token_spec(mesh, rules)).shard_shape(
        (BATCH, LENGTH)
    )
    holders = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for rank in range(mesh.num_ranks):
        holders[sharding.slices(holders.shape, rank)] += 1
    parts = mesh.size(*(axis for axes in sharding.spec for axis in axes))
    assert (holders == mesh.num_ranks // parts).all()


def test_numbers_of_tokens_are_those_of_one_process_for_any_lengths() -> None:
    def check() -> bool:
        mesh = Mesh({"data": 2, "context": 2})
        sequences, positions = token_sharding(mesh).slices((4, 6))
        length = 3 if mesh.coordinates()["data"] == 0 else 2  # shorter sequences, padded less
        numbers = token_group(mesh).numbers(2, length, torch.device("cpu"))
        whole = LocalTokens().numbers(4, 6, torch.device("cpu"))
        start = positions.start * length // 3
        return whole.unique().numel() == 24 and numbers.equal(whole[sequences, start : start + length])

    assert run_ranks(check, 4) == [True] * 4


def test_ranks_with_few_sequences_and_with_none() -> None:
    expected, gradients = step_of_one_process(BLOCK)

    def check() -> None:
        model, sizes = parallelize(decoder(BLOCK), Mesh({"fsdp": 4}), "pure-fsdp"), (0, 1, 7, 0)
        tokens, targets = (whole.split(sizes)[dist.get_rank()] for whole in batch())
        output = model(tokens)
        loss(output, targets).backward()
        assert_same(output.logits, expected.logits.split(sizes)[dist.get_rank()])
        assert_same(output.aux_loss, expected.aux_loss)
        for name, parameter in model.named_parameters():
            assert_same(parameter.grad.full_tensor(), gradients[name], name)

    run_ranks(check, 4)


def test_micro_batches_with_padding_are_one_large_batch() -> None:
    """`mean_over_tokens` of micro-batches with different numbers of valid tokens, and `count_tokens`."""
    whole, (tokens, targets) = decoder(BLOCK), batch()
    mask = torch.rand(tokens.shape) < 0.7
    mask[3] = False

    def mean(model: Any, part: tuple[slice, ...], **options: Any) -> Tensor:
        logits = model(tokens[part], mask[part]).logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets[part].flatten(), reduction="none")
        loss = maxmoe.mean_over_tokens(losses.view_as(mask[part]), mask[part], **options)
        loss.backward()
        return loss

    expected = mean(whole, (slice(None),))

    def check() -> None:
        mesh = Mesh({"fsdp": 2, "expert": 2})
        (sequences, _), group = token_sharding(mesh, "ep-as-dp").slices(tokens.shape), token_group(mesh, "ep-as-dp")
        model, num_tokens = parallelize(decoder(BLOCK), mesh, "ep-as-dp"), count_tokens(mask[sequences], tokens=group)
        assert int(num_tokens) == int(mask.sum())
        micro_batches = [(slice(start, start + 1),) for start in range(sequences.start, sequences.stop)]
        losses = [mean(model, part, tokens=group, num_tokens=num_tokens) for part in micro_batches]
        assert len(losses) == 2
        assert_same(torch.stack(losses).sum(), expected)
        for name, parameter in whole.named_parameters():
            assert_same(parameter.grad, model.get_parameter(name).grad.full_tensor(), name)

    run_ranks(check, 4)


def test_no_token_and_wrong_masks() -> None:
    losses = torch.randn(2, 3, requires_grad=True)
    loss = maxmoe.mean_over_tokens(losses, torch.zeros(2, 3).bool())
    loss.backward()
    assert loss == 0 and losses.grad is not None and torch.equal(losses.grad, torch.zeros(2, 3))
    assert maxmoe.mean_over_tokens(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.float32
    message = r"^token_mask must be bool of shape \(2, 3\), got torch.bool of shape \(6,\)$"
    with pytest.raises(ValueError, match=message):
        maxmoe.mean_over_tokens(losses, torch.ones(6).bool())
