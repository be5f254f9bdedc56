"""Load of the experts over windows of steps."""

from collections.abc import Mapping

import torch
from torch import Tensor

NUM_WINDOWS = 100


class LoadWindows:
    """Sums the counts of the experts over windows of steps.

    If there are more windows than NUM_WINDOWS, neighbors are merged in pairs. The length of a window therefore depends
    only on the steps so far, not on the planned number, which may grow.

    Args:
        num_steps: number of steps so far.
        tokens_per_expert: counts of each layer ``(NUM_WINDOWS, E)``, int64, in the windows of these steps.
    """

    def __init__(self, num_steps: int, tokens_per_expert: dict[str, Tensor]) -> None:
        self.num_steps = num_steps
        self.tokens_per_expert = tokens_per_expert

    @staticmethod
    def length(num_steps: int) -> int:
        """Return the steps per window: the smallest power of two for which NUM_WINDOWS windows are enough."""
        return 1 << (max(0, num_steps - 1) // NUM_WINDOWS).bit_length()

    def add(self, loads: Mapping[str, Tensor], num_steps: int) -> None:
        """Add the loads ``(num_steps, E)`` of each layer in the next steps."""
        before, self.num_steps = self.num_steps, self.num_steps + num_steps
        length = self.length(self.num_steps)
        for layer, load in loads.items():
            counts = self.tokens_per_expert.get(layer)
            if counts is None:
                counts = load.new_zeros(NUM_WINDOWS, load.shape[1])
            counts = _merged(counts.to(load.device), length // self.length(before))
            windows = torch.arange(before, self.num_steps, device=load.device) // length
            self.tokens_per_expert[layer] = counts.index_add(0, windows, load)


def _merged(counts: Tensor, factor: int) -> Tensor:
    """Sum every `factor` consecutive windows, and append zeros for future windows."""
    whole = torch.cat([counts, counts.new_zeros(-len(counts) % factor, counts.shape[1])])
    sums = whole.view(-1, factor, counts.shape[1]).sum(1)
    return torch.cat([sums, counts.new_zeros(len(counts) - len(sums), counts.shape[1])])
