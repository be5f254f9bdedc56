"""A process of a real mesh that has been one rank of an equal fake mesh."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from maxmoe.costs import estimate
from maxmoe.parallel import parallelize
from maxmoe.ranks.named_collectives import CHECK_VARIABLE
from maxmoe.sharding import Mesh
from support.parallel_decoder import BATCH, LENGTH, decoder
from support.run_ranks import run_ranks


def test_tensors_of_a_real_mesh_are_not_on_the_fake_one() -> None:
    """Both meshes are equal to torch, which caches the sharding of the results of operators."""

    def check() -> list[str]:
        model, sizes = decoder(), {"expert": 2}
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        step: dict[str, Any] = {"batch_size": BATCH, "sequence_length": LENGTH, "optimizer": "muon"}
        estimate(model, Mesh.planned(sizes), "ep-as-dp", **step)
        parallelize(model, Mesh(sizes), "ep-as-dp")
        results = {name: parameter.detach() for name, parameter in model.named_parameters()}
        assert any(isinstance(result, DTensor) for result in results.values())
        return [
            name
            for name, result in results.items()
            if isinstance(result, DTensor) and not torch.equal(result.full_tensor(), whole[name])
        ]

    assert run_ranks(check, 2) == [[], []]


def test_a_step_is_measured_again_after_the_process_groups_have_been_destroyed() -> None:
    """torch then unregisters all groups, also the groups of fake worlds."""
    step = {"batch_size": BATCH, "sequence_length": LENGTH}
    before = estimate(decoder(), Mesh.planned({"expert": 4}), "ep-as-dp", **step)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert estimate(decoder(), Mesh.planned({"expert": 4}), "ep-as-dp", **step) == before


def test_collectives_are_not_compared_with_ranks_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"batch_size": BATCH, "sequence_length": LENGTH}
    expected = estimate(decoder(), Mesh.planned({"expert": 4}), "ep-as-dp", **step)
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    assert estimate(decoder(), Mesh.planned({"expert": 4}), "ep-as-dp", **step) == expected
