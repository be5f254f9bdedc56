"""An optimizer that steps between a forward and its backward: an error on every mesh, as in one process."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel import parallelize, token_sharding
from maxmoe.sharding import Mesh
from support.parallel_decoder import BLOCK, MeshRules, batch, decoder, loss
from support.run_ranks import run_cases

MESHES = [
    MeshRules("pure-fsdp", {"fsdp": 2}),
    MeshRules("shard-exp-on-fsdp", {"fsdp": 2}),
    MeshRules("ep-as-dp", {"expert": 2}),
    MeshRules("ep-tp", {"expert": 2}),
    MeshRules("default", {"data": 2}),
    MeshRules("default", {"tensor": 2}),
    MeshRules("default", {"context": 2}),
]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "Muon": lambda model: Muon(parameter_groups(model), lr=0.1),
}


def test_a_step_before_the_backward_is_an_error_on_every_rank() -> None:
    """Muon modifies the shards of FSDP2, not the DTensors."""

    def check(layout: MeshRules, name: str) -> None:
        mesh = Mesh(layout.sizes)
        model = parallelize(decoder(BLOCK), mesh, layout.rules)
        optimizer, part = OPTIMIZERS[name](model), token_sharding(mesh, layout.rules).slices(batch()[0].shape)
        tokens, targets = (whole[part] for whole in batch())
        first, second = loss(model(tokens), targets), loss(model(tokens), targets)
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()

    run_cases(check, 2, zip(MESHES, itertools.cycle(["Muon", "SGD", "AdamW"])))
