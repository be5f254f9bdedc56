"""Metrics of the layers of a pipeline, of which each rank has those of its stages."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.expert_load.metrics_accumulator import packed_size
from maxmoe.ranks.named_collectives import all_reduce


@dataclass(frozen=True)
class LayersOfStages:
    """The Mixture-of-Experts layers of all stages of a pipeline.

    Args:
        num_experts: number of experts of each layer, by its path in the whole model; equal on all ranks.
        group: process group over the stages; None if there is one stage.
        device: device of the collective.
    """

    num_experts: Mapping[str, int]
    group: dist.ProcessGroup | None
    device: str

    def all_reduce(self, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the packed metrics of all layers, given those of this rank's layers; collective over the stages."""
        sizes = [packed_size(count) for count in self.num_experts.values()]
        sums = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        of_layers = dict(zip(self.num_experts, torch.split(sums, sizes), strict=True))
        for path, packed in metrics.items():
            of_layers[path].copy_(packed)
        if self.group is not None:
            all_reduce(sums, "metrics of the layers of stages", group=self.group)
        return of_layers

    def __deepcopy__(self, _memo: object) -> "LayersOfStages":
        """Return the object itself: process groups cannot be copied."""
        return self
