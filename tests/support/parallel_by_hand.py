"""Tensor and expert parallelism by hand, with ordinary tensors and collectives, whose gradients are right."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import Tensor, nn

from support.compared_models import BATCH, WIDTH, Terms, backward, build, reduce_gradients, share_of_loss


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


class TensorParallelByHand(nn.Module):
    """Half of the hidden features as ordinary tensors, without DTensor; the names are the same as in `Dense`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        rank, count = dist.get_rank(), dist.get_world_size()
        self.norm, self.up, self.down = model.norm, model.up, model.down
        for layer, name, dim in ((self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1)):
            setattr(layer, name, nn.Parameter(getattr(layer, name).detach().chunk(count, dim)[rank].clone()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(SameOnRanks.apply(self.norm(x))))
        return SumOfParts.apply(hidden @ self.down.weight.mT) + self.down.bias


class ListOfExperts(nn.Module):
    """One module per expert; a rank keeps some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if dist.is_initialized():
            x, weights = (fc.all_gather_single(tensor, 0, dist.group.WORLD) for tensor in (x, weights))
        mine = [number for number, expert in enumerate(self.experts) if isinstance(expert, nn.Linear)]
        total = torch.stack([self.experts[number](x) * weights[..., number, None] for number in mine]).sum(0)
        return fc.reduce_scatter_single(total, "sum", 0, dist.group.WORLD) if dist.is_initialized() else total


build_list = partial(build, ListOfExperts)


def keep_experts(model: Any) -> nn.Module:
    for number in range(4):
        if number % dist.get_world_size() != dist.get_rank():
            model.experts[number] = nn.Identity()
    return model


def share_of_dense_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return dense_loss(model, batch) * len(batch[0]) / BATCH


def reduced(*names: str) -> Any:
    """A step that sums the gradients of some parameters over all ranks."""

    def step(model: nn.Module, batch: Any) -> Terms:
        terms = share_of_dense_loss(model, batch) if isinstance(model, ListOfExperts) else share_of_loss(model, batch)
        found = backward(terms if isinstance(terms, dict) else {"loss": terms})
        for name in names:
            reduce_gradients(model, names=name)
        if getattr(model, "replicas", None):
            reduce_gradients(model, model.replicas, "experts")
        return found

    return step
