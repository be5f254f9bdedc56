"""Which tokens of a batch a rank has."""

import pytest
import torch

from maxmoe.parallel import token_sharding
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding, P
from support.parallel_decoder import BATCH, LENGTH, MeshRules, layouts, token_spec


@pytest.mark.parametrize(
    ("rules", "sizes", "spec"),
    [
        ("ep-as-dp", {"fsdp": 2, "expert": 4}, P(("fsdp", "expert"), None)),
        ("ep-as-cp", {"fsdp": 2, "expert": 4}, P("fsdp", "expert")),
        ("ep-tp", {"data": 2, "expert": 4}, P("data", None)),
        ("default", {"fsdp": 2, "context": 1, "tensor": 3}, P("fsdp", None)),  # neither absent axes nor those of one
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


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match=r"there is no preset 'fsdp', only .*pure-fsdp"):
        token_sharding(Mesh.planned({"fsdp": 2}), "fsdp")
