"""Losses and statistics that a layer accumulates in the backward pass."""

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe._torch import reshaped
from maxmoe.expert_load.stats import MoEStats
from maxmoe.expert_load.step_counts import StepCounts


class _WithGradient(torch.autograd.Function):
    # Identity for x. The backward returns the saved tensor as the gradient of the second input, the target.
    @staticmethod
    def forward(x: Tensor, _target: Tensor, _gradient: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return *gradients, gradient, None


def with_gradient(x: Tensor, target: Tensor, gradient: Tensor) -> Tensor:
    """Return x and attach `gradient` to it: the backward through x adds `gradient` to the gradient of `target`.

    The backward through x runs once for each forward that contributes to the loss, no matter how often activation
    checkpointing recomputes the forward. The gradient of x is unchanged.
    """
    # PyTorch returns a view of an input that a Function returns unchanged, and forbids in-place operators on it.
    attached = _WithGradient.apply(x, target, gradient)  # type: ignore[no-untyped-call]
    return reshaped(attached, x.shape)


class AccumulatedMetrics(NamedTuple):
    """Sums of a `MetricsAccumulator`.

    Attributes:
        calls: ``()``, float64, number of forwards whose backward has run.
        aux_loss: ``()``, float64, sum of the auxiliary losses.
        stats: sums of the counts and of the entropy.
    """

    calls: Tensor
    aux_loss: Tensor
    stats: MoEStats


# Index of the auxiliary loss in packed metrics.
AUX_LOSS = 1


def packed_size(num_experts: int) -> int:
    """Return the number of elements of packed metrics."""
    return num_experts + 4


def packed(aux_loss: Tensor, stats: MoEStats) -> Tensor:
    """Pack the metrics of one forward into a tensor that can be summed over forwards and ranks."""
    # float64, in which counts are exact up to 2^53.
    scalars = (torch.ones_like(aux_loss), aux_loss.detach(), stats.dropped, stats.router_entropy)
    return torch.cat([torch.stack([scalar.double() for scalar in scalars]), stats.tokens_per_expert.double()])


def unpacked(sums: Tensor) -> AccumulatedMetrics:
    """Unpack sums of packed metrics."""
    calls, aux_loss, dropped, entropy = sums[:4].unbind()
    return AccumulatedMetrics(calls, aux_loss, MoEStats(sums[4:].long(), dropped.long(), entropy))


class BackwardSum:
    """Sums float64 tensors of one shape in the backward, as the gradient of a leaf tensor."""

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.leaf = torch.zeros(shape, dtype=torch.float64, device=device, requires_grad=True)

    def add(self, x: Tensor, summand: Tensor) -> Tensor:
        """Add the summand in the backward through the returned x, which must require a gradient."""
        return with_gradient(x, self.leaf, summand)

    def take(self) -> Tensor:
        """Return the sum and reset it to zero."""
        total, self.leaf.grad = self.leaf.grad, None
        return torch.zeros_like(self.leaf, requires_grad=False) if total is None else total


class MetricsAccumulator:
    """Sums the auxiliary losses and statistics of one layer in the backward.

    Args:
        num_experts: number of experts of the statistics.
        num_bins: number of bins of the histograms of quantile balancing; None for another rule.
        device: device of the sums.
        process_group: ranks with different tokens under DDP or FSDP; None for the default group.

    Attributes:
        step: counts of the step for the balance loss of the scope "step".
        histogram: sum of the histograms of quantile balancing; None for another rule.
    """

    step: StepCounts
    histogram: BackwardSum | None

    def __init__(
        self,
        num_experts: int,
        *,
        num_bins: int | None = None,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._num_bins, self._device, self._process_group = num_bins, device, process_group
        self.resize(num_experts)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MetricsAccumulator":
        """Copy the sums; the copy shares the process group, which cannot be copied."""
        memo[id(self._process_group)] = self._process_group
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def resize(self, num_experts: int) -> None:
        """Start new sums, for another number of experts."""
        device = self._device
        self.step = StepCounts(num_experts, device, self._process_group)
        self.histogram = None if self._num_bins is None else BackwardSum(num_experts, self._num_bins, device=device)
        self._metrics = BackwardSum(packed_size(num_experts), device=device)

    @property
    def leaves(self) -> list[Tensor]:
        """Leaf tensors whose gradients are the sums."""
        return [self._metrics.leaf] if self.histogram is None else [self._metrics.leaf, self.histogram.leaf]

    def add(self, hidden_states: Tensor, aux_loss: Tensor, stats: MoEStats) -> Tensor:
        """Add a loss and statistics to the sums in the backward through the returned `hidden_states`."""
        return self._metrics.add(hidden_states, packed(aux_loss, stats))

    def reset(self) -> None:
        """Reset all sums to zero."""
        self.take()
        if self.histogram is not None:
            self.histogram.take()

    def take(self) -> Tensor:
        """Return the packed sums and reset them to zero, with the counts of the step."""
        metrics = self._metrics.take()
        metrics[AUX_LOSS] += self.step.take()
        return metrics
