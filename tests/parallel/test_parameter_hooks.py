"""Storages of gathered parameters that are freed between forward and backward, and shards that an optimizer changes."""

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe._torch import all_gather_single
from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel import parallelize, token_sharding
from maxmoe.ranks import named_collectives
from maxmoe.sharding import Mesh
from support.memory import saved_for_backward
from support.parallel_decoder import BLOCK, MeshRules, batch, decoder, loss
from support.run_ranks import run_cases, run_ranks


def test_memory_that_one_rank_holds_for_longer_decides_no_collective() -> None:
    """The thread of a collective holds its output for a time that differs between ranks."""
    held: list[Tensor] = []

    def all_gather_and_hold(output: Tensor, shard: Tensor, **options: Any) -> Any:
        if dist.get_rank() == 0:
            held.append(output)
        return all_gather_single(output, shard, **options)

    def check() -> None:
        model = parallelize(decoder(), Mesh({"expert": 2}), "ep-as-dp", dispatch="gather_weights")
        with patch.object(named_collectives, "all_gather_single", all_gather_and_hold):
            for _ in range(2):
                model(batch()[0]).logits.sum().backward()

    run_ranks(check, 2, timeout=20.0)


def test_a_model_keeps_no_gathered_parameter() -> None:
    def kept() -> tuple[int, int]:
        model = parallelize(decoder(), Mesh({"expert": 2}), "ep-as-dp", dispatch="gather_weights")
        with saved_for_backward() as saved:
            output = model(batch()[0][:2, :4])  # hidden states of no shape of a weight
        named = model.named_parameters()
        shapes = {tuple(parameter.shape) for name, parameter in named if ".experts." in name and parameter.dim() == 3}
        weights = [tensor for tensor in saved if tuple(tensor.shape) in shapes]
        empty = sum(tensor.untyped_storage().nbytes() == 0 for tensor in weights)
        output.logits.sum().backward()
        filled = sum(tensor.untyped_storage().nbytes() > 0 for tensor in weights)
        return empty, filled

    for empty, filled in run_ranks(kept, 2):
        assert empty == filled > 0


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
