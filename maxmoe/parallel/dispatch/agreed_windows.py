"""Agreement of all ranks of a mesh on the number of windows of rows, since each gathers and reduces parameters."""

from dataclasses import dataclass

import torch

from maxmoe.parallel.dispatch.collectives import all_gather_counts
from maxmoe.sharding.mesh import Mesh


@dataclass(frozen=True)
class LargestOnMesh:
    """The `maxmoe.nn.windows.Agreement` of ranks along some axes of a mesh: an all-gather of the numbers."""

    mesh: Mesh
    axes: tuple[str, ...]

    def __call__(self, numbers: list[int], device: torch.device) -> list[int]:
        """Return the largest value of each number over the ranks."""
        group = self.mesh.process_group(*self.axes)
        _, gathered = all_gather_counts(torch.tensor(numbers, device=device), group.group_name)
        largest: list[int] = gathered.amax(0).tolist()
        return largest
