"""Loss, auxiliary losses and routing statistics of a step, over all stages."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from maxmoe.expert_load.layers_of_stages import LayersOfStages
from maxmoe.expert_load.metrics_accumulator import packed, packed_size, unpacked
from maxmoe.expert_load.stats import MoEStats
from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.nn import MoE
from maxmoe.nn.routing import Routing
from maxmoe.nn.routing_losses import RoutingLosses
from maxmoe.ranks.named_collectives import all_reduce
from maxmoe.ranks.token_group import TokenReductions
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

    def __call__(
        self,
        routing: Routing,
        dropped: Tensor,
        num_sequences: int,
        tokens: TokenReductions,
        step: StepCounts | None = None,
    ) -> tuple[Tensor, MoEStats]:
        """Compute auxiliary loss and statistics of one forward."""
        aux_loss, stats = super().__call__(routing, dropped, num_sequences, tokens, step)
        if not is_recomputation():
            self.sums[:] = [sum(self.sums, packed(aux_loss, stats))]
        return aux_loss, stats

    def take(self) -> Tensor:
        """Return the sums and reset them."""
        return self.sums.pop() if self.sums else torch.zeros(packed_size(self.config.num_selectable_experts))


class StepStatistics:
    """Sums losses and statistics of a step over the layers, micro-batches and stages, of which a rank has a part."""

    def __init__(self, model: nn.Module, layers: LayersOfStages) -> None:
        self._layers = layers
        self._recorded: dict[str, RecordedLosses] = {}
        for path, layer in model.named_modules():
            if isinstance(layer, MoE):
                layer.losses = self._recorded[path] = RecordedLosses(layer.config, layer.losses.balance_loss)

    def reset(self) -> None:
        """Forget the forwards so far, such as those of a step that raised an error."""
        for recorded in self._recorded.values():
            recorded.take()

    def all_reduce(self, loss: Tensor, aux_loss_scale: float) -> PipelineOutput:
        """Sum over the stages and reset the sums; collective over the stages. The loss is zero in all but the last."""
        if self._layers.group is not None:
            all_reduce(loss, "the loss over stages", group=self._layers.group)
        aux_loss, stats = torch.zeros_like(loss), {}
        sums = self._layers.all_reduce({path: recorded.take() for path, recorded in self._recorded.items()})
        for path, total in sums.items():
            metrics = unpacked(total)
            aux_loss = aux_loss + metrics.aux_loss * aux_loss_scale
            entropy = metrics.stats.router_entropy / metrics.calls.clamp_min(1)
            stats[path] = metrics.stats._replace(router_entropy=entropy)
        return PipelineOutput(loss, aux_loss, stats)
