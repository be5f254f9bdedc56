"""Loss, auxiliary losses and routing statistics of a step, over all stages."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from maxmoe.expert_load.metrics_accumulator import packed, packed_size
from maxmoe.expert_load.stats import MoEStats
from maxmoe.nn.routing_losses import RoutingLosses
from maxmoe.recompute.selective import is_recomputation


class PipelineOutput(NamedTuple):
    """Results of a step over all micro-batches, stages and ranks; equal on all ranks.

    Attributes:
        loss: ``()``, float64, sum of the losses of all micro-batches, over all ranks with different tokens.
        aux_loss: ``()``, float64, sum of the auxiliary losses of all layers and micro-batches, times `aux_loss_scale`.
        stats: routing statistics of each Mixture-of-Experts layer, by its path in the model. Counts are summed over the
            micro-batches, the entropy is the mean.
    """

    loss: Tensor
    aux_loss: Tensor
    stats: dict[str, MoEStats]


@dataclass(frozen=True)
class RecordedLosses(RoutingLosses):
    """Losses and statistics of a layer, summed over its forwards. A recomputation in the backward is not counted."""

    are_recorded: ClassVar[bool] = True

    sums: list[Tensor] = field(default_factory=list)  # packed

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Tensor, MoEStats]:
        """Compute auxiliary loss and statistics of one forward."""
        aux_loss, stats = super().__call__(*arguments, **options)
        if not is_recomputation():
            self.sums[:] = [sum(self.sums, packed(aux_loss, stats))]
        return aux_loss, stats

    def take(self) -> Tensor:
        """Return the sums and reset them."""
        return self.sums.pop() if self.sums else torch.zeros(packed_size(self.config.num_selectable_experts))
