"""Sums of the auxiliary losses and statistics of one layer, added in the backward pass."""

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe._torch import never_compiled
from maxmoe.expert_load.stats import BoundedMoEStats, MoEStats
from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.recompute.attached_gradient import with_gradient

AUX_LOSS = 1  # index of the auxiliary loss in packed metrics
USE = 2  # numbers of the use of a buffer: the largest required factor, and the number of overflows


def packed_size(num_experts: int) -> int:
    """Return the number of elements of packed metrics."""
    return num_experts + 4


def packed(aux_loss: Tensor, stats: MoEStats) -> Tensor:
    """Pack the metrics of one forward into a float64 tensor that can be summed over forwards and ranks."""
    scalars = (torch.ones_like(aux_loss), aux_loss.detach(), stats.dropped, stats.router_entropy)
    return torch.cat([torch.stack([scalar.double() for scalar in scalars]), stats.tokens_per_expert.double()])


def unpacked(sums: Tensor, use: Tensor) -> tuple[Tensor, Tensor, BoundedMoEStats]:
    """Return the number of forwards ``()``, the sum of their auxiliary losses ``()``, and their statistics."""
    calls, aux_loss, dropped, entropy = sums[:4].unbind()
    stats = BoundedMoEStats(sums[4:].long(), dropped.long(), entropy / calls.clamp_min(1), use[0], use[1].long())
    return calls, aux_loss, stats


class StepBufferUse:
    """Largest required factor of a buffer, and number of overflows, of the forwards of one layer in a step.

    They are the same on all ranks of a mesh, so that nothing is reduced over ranks.
    """

    def __init__(self) -> None:
        self._use: Tensor | None = None  # (USE,), float64

    def add(self, stats: MoEStats) -> None:
        """Add the statistics of a forward."""
        if not isinstance(stats, BoundedMoEStats):
            return
        use = torch.stack([stats.required_buffer_factor, stats.overflowed.double()])
        if self._use is not None:
            use = torch.stack([torch.maximum(self._use[0], use[0]), self._use[1] + use[1]])
        self._use = use

    def take(self, like: Tensor) -> Tensor:
        """Return the numbers ``(USE,)``, float64, and reset them; zeros on the device of `like` for none."""
        use, self._use = self._use, None
        return torch.zeros(USE, dtype=torch.float64, device=like.device) if use is None else use


class MetricsAccumulator:
    """Sums the metrics of the forwards of one layer, each when its backward runs.

    Args:
        num_experts: E, number of experts of the statistics.
        num_bins: number of bins of the histograms of quantile balancing; 0 for another rule.
        device: device of the sums.
        process_group: ranks with different tokens under DDP or FSDP; None for the default group.

    Attributes:
        step: counts of the step for the balance loss of the scope "step".
        leaf: leaf tensor whose gradient is the sums: packed metrics, then a histogram ``(E, num_bins)``.
        use: use of the buffer of the layer.
    """

    def __init__(
        self, num_experts: int, num_bins: int, device: torch.device, process_group: dist.ProcessGroup | None
    ) -> None:
        self.num_experts, self.num_bins = num_experts, num_bins
        self.step = StepCounts(num_experts, device, process_group)
        size = packed_size(num_experts) + num_experts * num_bins
        self.use = StepBufferUse()
        self.leaf = torch.zeros(size, dtype=torch.float64, device=device, requires_grad=True)

    def resized(self, num_experts: int) -> "MetricsAccumulator":
        """Return an accumulator with the same settings and no sums, for another number of experts."""
        return MetricsAccumulator(num_experts, self.num_bins, self.leaf.device, self.step.process_group)

    def __deepcopy__(self, _memo: object) -> "MetricsAccumulator":
        """Return an accumulator without sums: the copy of a model has not run. Process groups cannot be copied."""
        return self.resized(self.num_experts)

    def add(self, hidden_states: Tensor, aux_loss: Tensor, stats: MoEStats, histogram: Tensor | None) -> Tensor:
        """Add metrics to the sums in the backward through the returned `hidden_states`."""
        summand = packed(aux_loss, stats)
        if histogram is not None:
            summand = torch.cat([summand, histogram.flatten()])
        hidden_states = with_gradient(hidden_states, self.leaf, summand)
        if isinstance(stats, BoundedMoEStats):
            self._add_use(hidden_states, stats)
        return hidden_states

    @never_compiled
    def _add_use(self, hidden_states: Tensor, stats: MoEStats) -> None:
        hidden_states.register_hook(lambda _gradient: self.use.add(stats))  # type: ignore[no-untyped-call]

    def take(self) -> Tensor:
        """Return the sums and reset them to zero, with the counts of the step."""
        sums, self.leaf.grad = self.leaf.grad, None
        if sums is None:
            sums = torch.zeros_like(self.leaf, requires_grad=False)
        sums[AUX_LOSS] += self.step.take()
        return sums
