"""The tokens of a batch that a rank has."""

import pytest
import torch

from maxmoe.nn import LocalTokens
from maxmoe.parallel import token_group, token_sharding
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding, P
from support.parallel_decoder import BATCH, LENGTH, MeshRules, layouts, token_spec
from support.run_ranks import run_ranks


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
