"""The tokens of one forward, spread over the ranks of a mesh."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from maxmoe.nn.parallel import TOKENS, Summands
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.movement import Layout, Move, move, stay, take_sum
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.resolve import logical_to_mesh_axes
from maxmoe.sharding.rules import LogicalRules


def token_sharding(mesh: Mesh, rules: LogicalRules | str) -> NamedSharding:
    """Find which tokens of a batch each rank gives to a parallelized module.

    ``batch[token_sharding(mesh, rules).slices(batch.shape)]``

    Args:
        mesh: of the ranks, planned or not.
        rules: the table, or the name of a preset.

    Returns:
        The sharding of a batch ``(B, S)``: its sequences over the axes of `activation_batch`, every sequence over those
        of `activation_length`.

    Raises:
        ValueError: for a preset that does not exist.
    """
    rules = LogicalRules.load(rules)
    return NamedSharding(mesh, activation_axes(TOKENS, mesh, rules))


def activation_axes(names: tuple[str, ...], mesh: Mesh, rules: LogicalRules) -> PartitionSpec:
    """Find the axes of an activation; a name without a rule has none."""
    spec = logical_to_mesh_axes([name if name in rules.names else None for name in names], rules)
    return PartitionSpec(*(tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in spec))


@dataclass(frozen=True)
class ShardedTokens:
    """See `maxmoe.nn.TokenLayout`.

    Args:
        mesh: of the ranks.
        batch_axes: its axes over which the sequences are spread.
        length_axes: its axes that cut every sequence, the outer cut first.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    length_axes: tuple[str, ...]

    def sum_within_sequences(self, *summands: Unpack[Summands]) -> tuple[Unpack[Summands]]:
        """See `TokenSums`."""
        sums: tuple[Unpack[Summands]] = self._sum(summands, self.length_axes)
        return sums

    def sum_across_sequences(self, *summands: Unpack[Summands]) -> tuple[Unpack[Summands]]:
        """See `TokenSums`."""
        sums: tuple[Unpack[Summands]] = self._sum(summands, self.batch_axes)
        return sums

    def first_position(self, length: int) -> int:
        """See `TokenLayout`."""
        whole_length = length * self.mesh.size(*self.length_axes)
        (part,) = NamedSharding(self.mesh, PartitionSpec(self.length_axes)).slices((whole_length,))
        return int(part.start)

    def whole_sequence(self, part: Tensor, dim: int) -> Tensor:
        """See `TokenLayout`."""
        return move(part, self.mesh, *self.sequence_moves(part.dim(), dim))

    def sequence_moves(self, num_dims: int, dim: int) -> tuple[Move, Move]:
        """The moves of `whole_sequence`: of the value, and of its gradient."""
        whole = PartitionSpec(*(None,) * num_dims)
        parts = Layout(PartitionSpec(*whole[:dim], self.length_axes, *whole[dim + 1 :]))
        return Move(parts, Layout(whole)), Move(Layout(whole, self.length_axes), parts)

    def _sum(self, summands: Any, axes: tuple[str, ...]) -> Any:
        if not axes:
            return summands
        tensors = [torch.as_tensor(summand, device=self.mesh.device_mesh.device_type) for summand in summands]
        packed = torch.cat([tensor.flatten().double() for tensor in tensors])  # counts below 2^53 stay exact
        # The loss is the same on every rank: each follows it back to its own summand, once.
        total = move(packed, self.mesh, take_sum(1, axes), stay(1))
        parts = torch.split(total, [tensor.numel() for tensor in tensors])
        return tuple(part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True))
