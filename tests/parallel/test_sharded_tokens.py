"""The tokens of a batch that a rank has, also none."""

import itertools

import pytest
import torch
import torch.distributed as dist

import maxmoe
from maxmoe.nn import LocalTokens
from maxmoe.parallel import Dispatch, parallelize, token_group, token_sharding
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding, P
from support.parallel_decoder import (
    BATCH,
    BLOCK,
    LENGTH,
    MOE,
    MeshRules,
    batch,
    decoder,
    layouts,
    loss,
    step_of_one_process,
    token_spec,
)
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks


@pytest.mark.parametrize(
    ("rules", "sizes", "spec"),
    [
        ("ep-as-dp", {"fsdp": 2, "expert": 4}, P(("fsdp", "expert"), None)),
        ("ep-as-cp", {"fsdp": 2, "expert": 4}, P("fsdp", "expert")),
        ("ep-tp", {"data": 2, "expert": 4}, P("data", None)),
        ("default", {"fsdp": 2, "context": 1, "tensor": 3}, P("fsdp", None)),  # neither absent axes nor axes of size 1
    ],
)
def test_known_places(rules: str, sizes: dict[str, int], spec: P) -> None:
    mesh = Mesh.planned(sizes)
    assert token_sharding(mesh, rules) == NamedSharding(mesh, spec)
    assert token_sharding(mesh, LogicalRules.load(rules)) == NamedSharding(mesh, spec)


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


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match=r"there is no preset 'fsdp', only .*pure-fsdp"):
        token_sharding(Mesh.planned({"fsdp": 2}), "fsdp")


def test_ranks_with_few_sequences_and_with_none() -> None:
    expected = step_of_one_process(BLOCK)

    def check() -> None:
        model, sizes = parallelize(decoder(BLOCK), Mesh({"fsdp": 4}), "pure-fsdp"), (0, 1, 7, 0)
        tokens, targets = (whole.split(sizes)[dist.get_rank()] for whole in batch())
        output = model(tokens)
        loss(output, targets).backward()
        assert_same(output.logits, expected.output.logits.split(sizes)[dist.get_rank()])
        assert_same(output.aux_loss, expected.output.aux_loss)
        for name, parameter in model.named_parameters():
            assert_same(parameter.grad.full_tensor(), expected.gradients[name], name)

    run_ranks(check, 4)


def test_the_replayed_routing_of_a_rank_without_tokens() -> None:
    tokens, _ = batch()

    def check(dispatch: Dispatch, shape: tuple[int, int]) -> None:
        mine = tokens.new_zeros(shape) if dist.get_rank() else tokens
        model = parallelize(decoder(BLOCK), Mesh({"expert": 2}), "ep-as-dp", dispatch=dispatch)
        with maxmoe.record_routing(model) as record:
            model(mine)
        with maxmoe.record_routing(model) as again, maxmoe.replay_routing(model, record):
            model(mine).logits.sum().backward()
        (ids,), (same,) = record.calls["blocks.0.feed_forward"], again.calls["blocks.0.feed_forward"]
        assert ids.equal(same) and ids.shape == (*mine.shape, MOE.top_k)

    run_cases(check, 2, itertools.product(("ring_of_experts", "ragged_all_to_all"), ((0, 6), (2, 0))))
