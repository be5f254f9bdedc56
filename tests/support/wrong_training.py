"""Mistakes in training on several ranks, and the first wrong gradient and the explanation that belong to each."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import Tensor, nn

from support.compared_models import (
    LENGTH,
    MICRO_BATCHES,
    REPLICATED,
    Case,
    Model,
    Terms,
    accumulate,
    alone,
    backward,
    ddp,
    expert_and_data_parallel,
    expert_parallel,
    loss,
    other_lengths,
    reduce_gradients,
    same_batch,
    scaled,
    share_of_loss,
)


def summed(model: nn.Module, batch: Any) -> Terms:
    """The loss is a mean over the rank's tokens: gradients must be averaged, not summed."""
    terms = backward(loss(model, batch))
    reduce_gradients(model)
    return terms


def own_gradient_counted_twice(model: nn.Module, batch: Any) -> Terms:
    """The gradients of a rank are added to the sum over all ranks, which contains them."""
    terms = backward(share_of_loss(model, batch))
    own = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    reduce_gradients(model)
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        assert parameter.grad is not None
        parameter.grad += gradient
    return terms


def router_not_reduced(model: nn.Module, batch: Any) -> Terms:
    """Router weights drift apart (torchtitan#2416)."""
    terms = backward(share_of_loss(model, batch))
    for name in ("first", "last", "norm", "experts"):
        reduce_gradients(model, names=name)
    return terms


def replicas_not_reduced(model: nn.Module, batch: Any) -> Terms:
    """Experts are reduced by their group alone, not over its replicas."""
    terms = backward(share_of_loss(model, batch))
    reduce_gradients(model, names=REPLICATED)
    return terms


def aux_loss_times_ranks(model: nn.Module, batch: Any) -> Terms:
    """The auxiliary loss is multiplied by the number of ranks (transformers#48690)."""
    return backward(scaled(loss(model, batch), aux=dist.get_world_size()))


def aux_loss_times_micro_batches(model: nn.Module, batch: Any) -> Terms:
    """Only the token loss is divided by the number of micro-batches (Automodel#3359)."""
    return accumulate(model, batch, aux=1.0)


def mean_not_divided_by_micro_batches(model: nn.Module, batch: Any) -> Terms:
    return accumulate(model, batch, all=1.0)


def gradients_wiped(model: nn.Module, batch: Any) -> Terms:
    """Gradients of earlier micro-batches are lost, the loss is right (Automodel#3530)."""

    def wipe(model: nn.Module, is_last: bool) -> None:
        if is_last:
            model.zero_grad()

    return accumulate(model, batch, wipe)


def backward_twice(model: nn.Module, batch: Any) -> Terms:
    """Two backward passes without `zero_grad` in between."""
    backward(loss(model, batch))
    return backward(loss(model, batch))


def sum_over_positions(model: nn.Module, batch: Any) -> Terms:
    """The loss of a rank is divided by its sequences, not by its tokens."""
    return backward(scaled(loss(model, batch), all=LENGTH))


class DetachedWeights(Model):
    """Routing weights without a gradient: the router learns from the auxiliary loss alone."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.gelu(self.first(x))
        logits = self.router(x)
        weights = logits.softmax(-1)
        weights = weights.detach() if dist.is_initialized() else weights
        x = x + self.experts(self.norm(x), weights)
        return self.last(x), logits.logsumexp(-1).square().mean()


def build_detached() -> nn.Module:
    torch.manual_seed(0)
    return DetachedWeights()


def frozen_experts(model: nn.Module) -> nn.Module:
    """A wrapper freezes the experts without a warning (unsloth#6936)."""
    model.experts.requires_grad_(False)
    return ddp(model)


def without_norm_gradient(model: nn.Module) -> nn.Module:
    """The norm runs without a graph, so that its parameters get no gradient."""
    forward = model.norm.forward
    model.norm.forward = lambda x: forward(x).detach() + x - x.detach()
    return alone(model)


def average(model: nn.Module, batch: Any) -> Terms:
    terms = backward(loss(model, batch))
    reduce_gradients(model, op=dist.ReduceOp.AVG)
    return terms


def average_of_replicated(model: nn.Module, batch: Any) -> Terms:
    """DDP averages replicated gradients, but the gradients of experts are not divided."""
    terms = backward(loss(model, batch))
    reduce_gradients(model, names=REPLICATED, op=dist.ReduceOp.AVG)
    return terms


class AllReduced(nn.Module):
    """A linear layer in parts, whose outputs are summed by an all-reduce with an all-reduce in the backward."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        rank, count = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(layer.weight.detach().chunk(count, 1)[rank].clone())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        part = x.chunk(dist.get_world_size(), -1)[dist.get_rank()] @ self.weight.mT
        return fc.all_reduce(part, "sum", dist.group.WORLD) + self.bias


def tensor_parallel_twice(model: nn.Module) -> nn.Module:
    """The output of the last layer is used on every rank: its backward must not be an all-reduce."""
    model.last = AllReduced(model.last)
    return model


def clipped_by_each_rank(model: nn.Module, batch: Any) -> Terms:
    """Ranks clip by different norms, as between groups of experts (Automodel#3816)."""
    terms = average(model, batch)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 1 + dist.get_rank()
    return terms


REDUCED = "missing reduction (sum) over all ranks: each rank has only its own gradient"
WRONG = {
    "gradients summed instead of averaged": Case(alone, step=summed, explanation="4 times: number of ranks"),
    "gradients averaged instead of summed": Case(
        ddp, loss=share_of_loss, explanation="0.25 times: 1 / number of ranks"
    ),
    "no reduction": Case(alone, explanation=REDUCED.replace("sum", "mean")),
    "own gradient counted twice": Case(
        alone,
        step=own_gradient_counted_twice,
        explanation="gradient of the tokens of rank 0, 1, 2, 3: 2, 1, 1, 1 times on rank 0; "
        "1, 2, 1, 1 times on rank 1; 1, 1, 2, 1 times on rank 2; 1, 1, 1, 2 times on rank 3",
    ),
    "router not reduced": Case(alone, step=router_not_reduced, first_wrong="router.bias", explanation=REDUCED),
    "experts not reduced over replicas": Case(
        expert_and_data_parallel,
        loss=share_of_loss,
        step=replicas_not_reduced,
        first_wrong="experts.down",
        explanation="missing reduction (sum) over mesh axis 'replicate': each rank has only its own gradient",
    ),
    "experts summed, the rest averaged": Case(
        expert_parallel,
        step=average_of_replicated,
        first_wrong="experts.down",
        explanation="4 times: number of ranks",
    ),
    "auxiliary loss times ranks": Case(
        ddp,
        step=aux_loss_times_ranks,
        first_wrong="router.bias",
        explanation="the term 'aux' is 4 times: number of ranks",
    ),
    "auxiliary loss times micro-batches": Case(
        ddp,
        step=aux_loss_times_micro_batches,
        first_wrong="router.bias",
        explanation="the term 'aux' is 3 times: micro-batches",
    ),
    "loss not divided by micro-batches": Case(
        ddp, step=mean_not_divided_by_micro_batches, explanation=f"{MICRO_BATCHES} times: micro-batches"
    ),
    "gradients of micro-batches lost": Case(
        ddp, step=gradients_wiped, explanation="gradient of the tokens of micro-batch 1, 2 of each rank: missing"
    ),
    "loss not divided by positions": Case(ddp, step=sum_over_positions, explanation="5 times: sequence length"),
    "backward twice": Case(ddp, step=backward_twice, explanation="2 times: micro-batches or summed twice"),
    "routing weights detached": Case(
        ddp, build=build_detached, first_wrong="router.bias", explanation="the term 'tokens' is missing"
    ),
    "frozen experts": Case(
        frozen_experts, first_wrong="experts.down", explanation="frozen on the ranks: requires_grad is False"
    ),
    "norm without a graph": Case(
        without_norm_gradient, step=average, first_wrong="norm.weight", explanation="detached on the ranks: no gradient"
    ),
    "all-reduce before replicated use": Case(
        tensor_parallel_twice,
        make_batch=same_batch,
        first_wrong="last.weight",
        explanation="4 times: number of ranks",
    ),
    "clipped by each rank": Case(
        alone,
        step=clipped_by_each_rank,
        explanation="right on rank 0, 0.5 times on rank 1, 0.333333 times on rank 2, "
        "0.25 times: 1 / number of ranks on rank 3",
    ),
    "ranks with different numbers of tokens": Case(
        ddp,
        make_batch=other_lengths,
        explanation="gradient of the tokens of rank 0: 2 times: summed twice; "
        "gradient of the tokens of rank 1, 2, 3: 0.857143 times",
    ),
}
