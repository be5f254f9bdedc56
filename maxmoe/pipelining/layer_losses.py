"""Auxiliary losses and statistics of the layers of a stage: added to the gradients, and recorded for the step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe.expert_load.metrics_accumulator import USE, StepBufferUse, packed, packed_size
from maxmoe.expert_load.stats import MoEStats
from maxmoe.nn import MoELayer, MoEOutput
from maxmoe.nn.feed_forward import FeedForwardLayer
from maxmoe.nn.losses import RoutingLosses
from maxmoe.ranks.named_collectives import all_reduce
from maxmoe.recompute.attached_gradient import with_gradient
from maxmoe.recompute.selective import is_recomputation


@dataclass(frozen=True)
class RecordedLosses(RoutingLosses):
    """Losses and statistics of a layer, summed over its forwards. A recomputation in the backward is not counted."""

    are_recorded: ClassVar[bool] = True

    sums: list[Tensor] = field(default_factory=list)  # packed
    use: StepBufferUse = field(default_factory=StepBufferUse)

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Tensor, MoEStats]:
        """Compute auxiliary loss and statistics of one forward."""
        aux_loss, stats = super().__call__(*arguments, **options)
        if not is_recomputation():
            self.sums[:] = [sum(self.sums, packed(aux_loss, stats))]
            self.use.add(stats)
        return aux_loss, stats

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the sums and the use of the buffer, and reset both."""
        sums = self.sums.pop() if self.sums else torch.zeros(packed_size(self.config.num_selectable_experts))
        return sums, self.use.take(sums)


@dataclass(frozen=True)
class LayersOfStages:
    """The Mixture-of-Experts layers of all stages of a pipeline."""

    num_experts: Mapping[str, int]  # of each layer, by its path in the whole model; equal on all ranks
    group: dist.ProcessGroup | None  # over the stages; None if there is one stage
    device: str

    def all_reduce(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return packed metrics and use of the buffer of all layers; `metrics` has this rank's layers.

        Collective over the stages.
        """
        sizes = [packed_size(count) + USE for count in self.num_experts.values()]
        sums = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        of_layers = dict(zip(self.num_experts, torch.split(sums, sizes), strict=True))
        for path, of_layer in metrics.items():
            of_layers[path].copy_(torch.cat(of_layer))
        if self.group is not None:
            all_reduce(sums, "metrics of the layers of stages", group=self.group)
        return {path: (of_layer[:-USE], of_layer[-USE:]) for path, of_layer in of_layers.items()}

    def __deepcopy__(self, _memo: object) -> "LayersOfStages":
        """Return the object itself: process groups cannot be copied."""
        return self


def add_aux_losses(model: nn.Module, scale: float) -> None:
    """Add the gradients of the auxiliary losses of all layers in the backward, so that no stage passes a loss on."""

    def attach(layer: Any, _arguments: tuple[Any, ...], output: MoEOutput) -> MoEOutput:
        if not output.aux_loss.requires_grad:
            return output
        loss = output.aux_loss * layer.aux_loss_scale
        hidden_states = with_gradient(output.hidden_states, loss, torch.ones_like(loss))
        return output._replace(hidden_states=hidden_states, aux_loss=output.aux_loss.detach())

    layers: list[Any] = [module for module in model.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        layer.aux_loss_scale = scale
        if not isinstance(layer, FeedForwardLayer):  # which adds the gradient itself
            layer.register_forward_hook(attach)
