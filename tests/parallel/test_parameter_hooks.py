"""Storages of gathered parameters that are freed between forward and backward."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe._torch import all_gather_single
from maxmoe.parallel import parallelize
from maxmoe.parallel.apply.parameter_hooks import GatheredParameter, ParameterVersion
from maxmoe.ranks import named_collectives
from maxmoe.recompute.freed_storage import FreedStorage
from maxmoe.sharding import Mesh
from support.parallel_decoder import batch, decoder
from support.run_ranks import run_ranks


def test_what_autograd_saved_is_there_again_for_the_backward() -> None:
    weight, x = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True)
    expected = torch.autograd.grad((x @ weight.t()).sum(), x)
    copy = weight.clone()
    output = x @ copy.t()  # autograd saves a view
    parameter = GatheredParameter(FreedStorage(copy), lambda: weight, ParameterVersion("weight", weight))
    parameter.storage.free()
    assert copy.untyped_storage().nbytes() == 0
    parameter.refill()
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected[0])


def test_values_for_memory_that_nobody_has_kept_are_dropped() -> None:
    """Every rank gathers as planned, also if autograd has kept no reference on this rank."""
    gathered: list[Tensor] = []

    def gather() -> Tensor:
        gathered.append(torch.ones(3))
        return gathered[-1]

    parameter = GatheredParameter(FreedStorage(torch.ones(3)), gather, ParameterVersion("weight", torch.ones(3)))
    parameter.storage.free()
    parameter.refill()
    kept = torch.zeros(3)  # has not been freed
    GatheredParameter(FreedStorage(kept), gather, ParameterVersion("weight", kept)).refill()
    assert len(gathered) == 2 and torch.equal(kept, torch.zeros(3))


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
        saved: list[Tensor] = []  # not by address, which is reused after a free

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
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
