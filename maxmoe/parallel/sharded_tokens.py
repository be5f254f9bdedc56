"""The tokens of one forward, sharded over the ranks of a mesh."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maxmoe.declaration import TOKEN_DIMS
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.redistribute import all_reduce, redistribute_local
from maxmoe.sharding.resolve import logical_to_mesh_axes
from maxmoe.sharding.rules import LogicalRules
from maxmoe.token_group import TokenGroup


def token_sharding(mesh: Mesh, rules: LogicalRules | str = "default") -> NamedSharding:
    """Find the sharding of the tokens that a parallelized module takes.

    ``batch[token_sharding(mesh, rules).slices(batch.shape)]`` are those of this rank.

    Args:
        mesh: of the ranks, planned or not.
        rules: the table, or the name of a preset.

    Returns:
        The sharding of a batch ``(B, S)``: the batch over the axes of `activation_batch`, the sequence over those of
        `activation_length`.

    Raises:
        ValueError: for a preset that does not exist.
    """
    rules = LogicalRules.load(rules)
    return NamedSharding(mesh, activation_spec(TOKEN_DIMS, mesh, rules))


def token_group(mesh: Mesh, rules: LogicalRules | str = "default") -> TokenGroup:
    """Return the ranks that share the tokens of a batch, for `mean_over_tokens`.

    Args:
        mesh: of the ranks.
        rules: the table, or the name of a preset.

    Returns:
        The reductions over them; ranks that hold the same tokens count once.

    Raises:
        ValueError: for a preset that does not exist.
    """
    return ShardedTokens(mesh, *token_sharding(mesh, rules).spec)


def activation_spec(names: tuple[str, ...], mesh: Mesh, rules: LogicalRules) -> PartitionSpec:
    """Return the axes larger than one that shard an activation; a name without a rule has none."""
    spec = logical_to_mesh_axes([name if name in rules.names else None for name in names], rules)
    return PartitionSpec(*(tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in spec))


@dataclass(frozen=True)
class ShardedTokens:
    """The `maxmoe.nn.TokenGroup` of a parallelized layer.

    Args:
        mesh: of the ranks.
        batch_axes: the axes that shard the batch.
        length_axes: the axes that shard every sequence, the major one first.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    length_axes: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that shard the tokens."""
        return (*self.batch_axes, *self.length_axes)

    def all_reduce_sequence(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """See `TokenReductions`."""
        return self._all_reduce(summands, self.length_axes) if self.length_axes else summands

    def all_reduce_batch(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """See `TokenReductions`."""
        return self._all_reduce(summands, self.batch_axes) if self.batch_axes else summands

    @not_compiled
    def first_position(self, length: int) -> int:
        """See `TokenGroup`."""
        whole_length = length * self.mesh.size(*self.length_axes)
        (part,) = NamedSharding(self.mesh, PartitionSpec(self.length_axes)).slices((whole_length,))
        return int(part.start)

    @not_compiled
    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """See `TokenGroup`."""
        sharded, gathered, partial = self.sequence_shardings(part.dim(), dim)
        return redistribute_local(part, sharded, gathered, grad_source=partial, grad_target=sharded)

    def sequence_shardings(self, num_dims: int, dim: int) -> tuple[NamedSharding, NamedSharding, NamedSharding]:
        """Return the shardings of a tensor in `all_gather_sequence`: before, after, and of the gradient after."""
        gathered = NamedSharding.replicated(self.mesh, num_dims)
        spec = PartitionSpec(*gathered.spec[:dim], self.length_axes, *gathered.spec[dim + 1 :])
        partial = NamedSharding.replicated(self.mesh, num_dims, partial=self.length_axes)
        return NamedSharding(self.mesh, spec), gathered, partial

    @not_compiled
    def _all_reduce(self, summands: tuple[Tensor | int, ...], axes: tuple[str, ...]) -> tuple[Any, ...]:
        tensors = [torch.as_tensor(summand, device=self.mesh.device_mesh.device_type) for summand in summands]
        packed = torch.cat([tensor.flatten().double() for tensor in tensors])
        # Every rank computes the same loss from the sums and backpropagates it to its own summands: identity backward.
        total = all_reduce(packed, self.mesh, axes)
        sums = torch.split(total, [tensor.numel() for tensor in tensors])
        return tuple(part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(sums, tensors, strict=True))
