"""Experts on several ranks with mistakes of public threads, see public_bugs.py."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import Tensor

from support.compared_models import WIDTH, Experts
from support.parallel_by_hand import SameOnRanks, SumOfParts


class AllReduceExperts(Experts):
    """Each rank's experts compute all tokens, which every rank has; outputs are summed."""

    are_scores_summed = True

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.group is None:
            return self.compute(x, weights)
        count, rank = len(self.up), self.group.rank()
        weights = SameOnRanks.apply(weights) if self.are_scores_summed else weights
        part = self.compute(SameOnRanks.apply(x), self.of_rank(weights, rank, count))
        return SumOfParts.apply(part)

    def of_rank(self, weights: Tensor, rank: int, count: int) -> Tensor:
        return weights[..., rank * count : (rank + 1) * count]


class UnsummedScores(AllReduceExperts):
    are_scores_summed = False


class WrongPairs(AllReduceExperts):
    """A rank takes routing weights of other experts: they are shifted by one place."""

    def of_rank(self, weights: Tensor, rank: int, count: int) -> Tensor:
        return super().of_rank(weights.roll(1, -1), rank, count)


class Sentinels(AllReduceExperts):
    """Two experts for each token; slots of other ranks are computed by the first local expert with a weight of zero."""

    def compute(self, x: Tensor, weights: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("bsd,edf->bsef", x, self.up))
        outputs = torch.einsum("bsef,efd->bsed", hidden, self.down)
        return (self.gathered(outputs, weights) * self.kept(weights)[..., None]).sum(-2)

    def of_rank(self, weights: Tensor, rank: int, count: int) -> Tensor:
        return weights

    def ids(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local id of each slot's expert, and whether the expert is local."""
        count, rank = len(self.up), 0 if self.group is None else self.group.rank()
        experts = weights.topk(2).indices
        is_local = experts // count == rank
        return torch.where(is_local, experts % count, 0), is_local

    def gathered(self, outputs: Tensor, weights: Tensor) -> Tensor:
        experts, _ = self.ids(weights)
        return outputs.gather(-2, experts[..., None].expand(*experts.shape, WIDTH))

    def kept(self, weights: Tensor) -> Tensor:
        """Return the weights; weights of slots of other ranks are zero in the forward, but have a gradient."""
        _, is_local = self.ids(weights)
        best = weights.topk(2).values
        return torch.where(is_local, best, best - best.detach())


class Gathered(torch.autograd.Function):
    """All-gather whose backward takes the slice of this rank from the gradient of this rank alone."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return fc.all_gather_single(x.contiguous(), 0, dist.group.WORLD).wait()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class SlicedGradient(Experts):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.group is None:
            return self.compute(x, weights)
        count, rank = len(self.up), self.group.rank()
        x, weights = Gathered.apply(x), fc.all_gather_single(weights, 0, self.group)
        part = self.compute(x, weights[..., rank * count : (rank + 1) * count])
        return fc.reduce_scatter_single(part, "sum", 0, self.group)


class DetachedScores(Experts):
    """The routing weights are gathered by a collective that autograd does not record."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, weights if self.group is None else weights.detach())
