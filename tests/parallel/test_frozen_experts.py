"""Experts frozen by freeze_experts stay frozen under DDP, and are refused where their parameters are replaced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import maxmoe
from maxmoe.parallel import parallelize, shard_parameters
from maxmoe.sharding import LogicalRules, Mesh
from maxmoe.surgery import freeze_experts
from support.parallel_decoder import decoder
from support.run_ranks import run_ranks

BATCHES = torch.randn(3, 4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with a frozen expert in its first layer, and its optimizer."""
    torch.manual_seed(0)
    config = maxmoe.MoEConfig(hidden_size=6, intermediate_size=5, num_experts=4, top_k=2)
    model = nn.Sequential(*(maxmoe.MoEFeedForward(config, dtype=torch.float64) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    freeze_experts(model, {"0": [1]}, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_ranks: int) -> None:
    for batch in BATCHES:
        model(batch.chunk(num_ranks)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_ddp_trains_as_one_process() -> None:
    def check() -> list[Tensor]:
        model, optimizer = make_model()
        train(DistributedDataParallel(model), optimizer, dist.get_rank(), 2)
        return [parameter.detach() for parameter in model.parameters()]

    (initial, _), (model, optimizer) = make_model(), make_model()
    train(model, optimizer, 0, 1)
    names = [name for name, _ in model.named_parameters()]
    for trained in run_ranks(check, 2):
        for name, ours, one, before in zip(names, trained, model.parameters(), initial.parameters(), strict=True):
            torch.testing.assert_close(ours, one.detach(), rtol=1e-9, atol=1e-12)
            if name.startswith("0.experts."):
                assert torch.equal(ours[1], before[1]) and not torch.equal(ours[0], before[0]), name


def test_parallelize_refuses_frozen_experts() -> None:
    def check() -> None:
        mesh, (model, _) = Mesh({"expert": 2}), make_model()
        before, wanted = list(model.parameters()), r"^0 must have no experts frozen by freeze_experts, which works in"
        rules = LogicalRules.load("ep-as-dp")
        calls: list[Callable[[], Any]] = [
            lambda: parallelize(model, mesh, rules),
            lambda: shard_parameters(model, mesh, rules),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=wanted):
                call()
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))

    run_ranks(check, 2)


def test_frozen_experts_on_one_rank_are_an_error_on_all() -> None:
    def check() -> None:
        model, _ = make_model()
        if dist.get_rank() == 1:
            model = nn.Sequential(*(type(layer)(layer.config, dtype=torch.float64) for layer in model))  # type: ignore
        with pytest.raises(ValueError, match=r"the ranks must agree on the module 0: .* with frozen experts"):
            parallelize(model, Mesh({"expert": 2}), "ep-as-dp")

    run_ranks(check, 2)


def test_pipeline_refuses_frozen_experts() -> None:
    def check() -> None:
        model = decoder()
        optimizer = torch.optim.AdamW(model.parameters())
        freeze_experts(model, {"blocks.1.feed_forward": [0]}, optimizer)
        with pytest.raises(ValueError, match=r"^blocks.1.feed_forward must have no experts frozen by freeze_experts"):
            maxmoe.pipeline(
                model, Mesh({"stage": 2}), schedule="1f1b", num_micro_batches=2, loss=lambda *_: torch.ones(())
            )

    run_ranks(check, 2)


@pytest.mark.parametrize("of_blocks", [False, True])
def test_fully_shard_does_not_train_frozen_experts(of_blocks: bool) -> None:
    def check() -> None:
        model, _ = make_model()
        mesh = init_device_mesh("cpu", (2,))
        for layer in model if of_blocks else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with pytest.raises(
            RuntimeError, match=r"^0 has experts frozen by freeze_experts.*does not work with fully_shard"
        ):
            model(BATCHES[0])

    run_ranks(check, 2)
