"""Routed slots of each expert over the micro-batches of an optimizer step, for a balance loss over the whole step."""

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.ranks.named_collectives import all_reduce


class StepCounts:
    """Routed slots of each expert, and tokens, of the micro-batches of a step whose backward has run.

    Args:
        num_experts: E, number of experts of the layer.
        device: device of the layer.
        process_group: ranks with different tokens under DDP or FSDP; None for the default group.

    Attributes:
        sums: ``(E + 1,)``, float64, slots of each expert, and tokens; ``maxmoe.nn`` adds to them in the backward.
        late: ``()``, float64, sum of the losses in the backward, less those in the forward.
    """

    def __init__(self, num_experts: int, device: torch.device, process_group: dist.ProcessGroup | None = None) -> None:
        # float64, in which counts are exact up to 2^53.
        self.sums = torch.zeros(num_experts + 1, dtype=torch.float64, device=device)
        self.late = torch.zeros((), dtype=torch.float64, device=device)
        self.process_group = process_group

    def all_reduce(self, counts: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Sum counts ``(E,)`` and a number ``()`` of tokens over the ranks of a layer without a token group."""
        if not dist.is_initialized():
            return counts, num_tokens
        packed = torch.cat([counts, num_tokens.reshape(1)])
        all_reduce(packed, "counts of a step", group=self.process_group)
        return packed[:-1], packed[-1]

    def take(self) -> Tensor:
        """Reset the counts, and return ``late``.

        Added to the sum of the losses of the forwards, it gives the sum of the losses whose gradients were taken.
        """
        late = self.late.clone()
        self.late.zero_()
        self.sums.zero_()
        return late
