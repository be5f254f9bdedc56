"""Loss, auxiliary losses and routing statistics of a step, over all stages."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from maxmoe.declaration import SavedTensor
from maxmoe.expert_load.layers_of_stages import LayersOfStages
from maxmoe.expert_load.metrics_accumulator import packed, packed_size, unpacked
from maxmoe.expert_load.stats import MoEStats
from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.nn import MoE
from maxmoe.nn.losses import RoutingLosses
from maxmoe.nn.routing import Routing
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


class RecordedLosses:
    """Computes auxiliary loss and statistics of a layer as `RoutingLosses` does, and sums them over the forwards.

    A recomputation in the backward is not counted.
    """

    are_recorded = True

    def __init__(self, losses: RoutingLosses) -> None:
        self._losses = losses
        self._total: Tensor | None = None

    def __call__(
        self,
        routing: Routing,
        dropped: Tensor,
        num_sequences: int,
        tokens: TokenReductions,
        step: StepCounts | None = None,
    ) -> tuple[Tensor, MoEStats]:
        """Compute auxiliary loss and statistics of one forward."""
        aux_loss, stats = self._losses(routing, dropped, num_sequences, tokens, step)
        if not is_recomputation():
            summand = packed(aux_loss, stats)
            self._total = summand if self._total is None else self._total + summand
        return aux_loss, stats

    def saved_tensors(self, batch: int, length: int, wide: torch.dtype) -> dict[str, SavedTensor]:
        """Describe the tensors that the losses save."""
        return self._losses.saved_tensors(batch, length, wide)

    def take(self) -> Tensor:
        """Return the sums and reset them."""
        total, self._total = self._total, None
        return torch.zeros(packed_size(self._losses.config.num_selectable_experts)) if total is None else total


class StepStatistics:
    """Sums losses and statistics of a step over the layers, micro-batches and stages.

    Args:
        model: the part of the model that this rank has.
        layers: layers of all stages.
    """

    def __init__(self, model: nn.Module, layers: LayersOfStages) -> None:
        self._layers = layers
        self._recorded: dict[str, RecordedLosses] = {}
        for path, layer in model.named_modules():
            if isinstance(layer, MoE):
                layer.losses = self._recorded[path] = RecordedLosses(layer.losses)  # type: ignore[assignment]

    def reset(self) -> None:
        """Forget the forwards so far, such as those of a step that raised an error."""
        for recorded in self._recorded.values():
            recorded.take()

    def all_reduce(self, loss: Tensor, aux_loss_scale: float) -> PipelineOutput:
        """Sum over the stages and reset the sums; collective over the stages.

        Args:
            loss: ``()``, float64, loss over the ranks of the last stage; zero in all other stages.
            aux_loss_scale: factor of the auxiliary losses.
        """
        if self._layers.group is not None:
            all_reduce(loss, "the loss over stages", group=self._layers.group)
        aux_loss, stats = torch.zeros_like(loss), {}
        sums = self._layers.all_reduce({path: recorded.take() for path, recorded in self._recorded.items()})
        for path, total in sums.items():
            metrics = unpacked(total)
            aux_loss = aux_loss + metrics.aux_loss * aux_loss_scale
            stats[path] = metrics.stats._replace(
                router_entropy=metrics.stats.router_entropy / metrics.calls.clamp_min(1)
            )
        return PipelineOutput(loss, aux_loss, stats)
