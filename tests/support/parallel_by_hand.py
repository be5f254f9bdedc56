"""Tensor parallelism by hand, with ordinary tensors and collectives, whose gradients are right."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import Tensor, nn

from support.compared_models import WIDTH, build


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


build_dense = partial(build, Dense)


def dense_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class SumOfParts(torch.autograd.Function):
    """All-reduce whose result is used on every rank: its backward is the identity."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return fc.all_reduce(x, "sum", dist.group.WORLD).wait()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient


class SameOnRanks(torch.autograd.Function):
    """Identity whose backward is an all-reduce."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return fc.all_reduce(gradient.contiguous(), "sum", dist.group.WORLD).wait()


def split_features(model: Any) -> Any:
    """Keep this rank's hidden features, as ordinary parameters."""
    rank, count = dist.get_rank(), dist.get_world_size()
    for layer, name, dim in ((model.up, "weight", 0), (model.up, "bias", 0), (model.down, "weight", 1)):
        setattr(layer, name, nn.Parameter(getattr(layer, name).detach().chunk(count, dim)[rank].clone()))
    return model


def tensor_parallel_by_hand(model: Any) -> nn.Module:
    def forward(x: Tensor) -> Tensor:
        hidden = F.gelu(model.up(SameOnRanks.apply(model.norm(x))))
        return SumOfParts.apply(hidden @ model.down.weight.mT) + model.down.bias

    split_features(model).forward = forward
    return model
