"""Tokens of one forward, sharded over the ranks of a mesh."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from maxmoe._torch import never_compiled
from maxmoe.declaration import TOKEN_DIMS
from maxmoe.ranks.token_group import TokenGroup, numbers_of_tokens
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding, PartitionSpec
from maxmoe.sharding.redistribute import Redistribution, redistribute_local
from maxmoe.sharding.rules import LogicalRules, mesh_axes


def token_sharding(mesh: Mesh, rules: LogicalRules | str = "default") -> NamedSharding:
    """Return the sharding of the tokens that a parallelized module takes.

    ``batch[token_sharding(mesh, rules).slices(batch.shape)]`` are the tokens of this rank.

    Args:
        mesh: mesh on which the module runs; may be planned.
        rules: rules that map logical names to mesh axes, or the name of a preset.

    Returns:
        Sharding of a batch ``(B, S)``: the batch over the axes of the rule `activation_batch`, the sequence over the
        axes of `activation_length`.

    Raises:
        ValueError: for an unknown preset.
    """
    rules = LogicalRules.load(rules)
    return NamedSharding(mesh, activation_spec(TOKEN_DIMS, mesh, rules))


def token_group(mesh: Mesh, rules: LogicalRules | str = "default") -> TokenGroup:
    """Return the token group of a mesh, for `mean_over_tokens`; arguments as for `token_sharding`.

    Returns:
        Reductions over the ranks that share the tokens of a batch; ranks with the same tokens are counted once.
    """
    return ShardedTokens(mesh, *token_sharding(mesh, rules).spec)


def activation_spec(names: tuple[str, ...], mesh: Mesh, rules: LogicalRules) -> PartitionSpec:
    """Return the partition spec of an activation, with axes larger than one; a name without a rule has no axes."""
    return PartitionSpec(*(tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in mesh_axes(names, rules)))


@dataclass(frozen=True)
class ShardedTokens:
    """The `maxmoe.nn.TokenGroup` of tokens that are sharded over mesh axes.

    Args:
        length_axes: mesh axes that shard the sequences, the major axis first.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    length_axes: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the tokens."""
        return (*self.batch_axes, *self.length_axes)

    def all_reduce_sequence(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Sum over the axes that shard the sequences, in one all-reduce per axis."""
        return self._all_reduce(summands, self.length_axes) if self.length_axes else summands

    def all_reduce_batch(self, *summands: Tensor | int) -> tuple[Any, ...]:
        """Sum over the axes that shard the batch, in one all-reduce per axis."""
        return self._all_reduce(summands, self.batch_axes) if self.batch_axes else summands

    @never_compiled
    def first_position(self, length: int) -> int:
        """Compute the position of this rank's first token from its coordinates on the mesh."""
        return self._part(length, self.length_axes).start

    @never_compiled
    def numbers(self, num_sequences: int, length: int, device: torch.device) -> Tensor:
        """Compute the numbers from this rank's coordinates, for the same number of sequences on all ranks."""
        of_stage, part = self.mesh.stage * 2**24, self._part(num_sequences, self.batch_axes)
        sequences = range(of_stage + part.start, of_stage + part.stop)
        return numbers_of_tokens(sequences, self._part(length, self.length_axes), device)

    def _part(self, count: int, axes: tuple[str, ...]) -> range:
        """Return the indices of this rank's `count` items of a dim that is sharded over axes."""
        (part,) = NamedSharding(self.mesh, PartitionSpec(axes)).slices((count * self.mesh.size(*axes),))
        return range(part.start, part.stop)

    @never_compiled
    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """All-gather over the axes that shard the sequences; reduce-scatter the gradient in the backward."""
        return redistribute_local(part, self.sequence_redistribution(part.dim(), dim), "a sharded sequence")

    def sequence_redistribution(self, num_dims: int, dim: int) -> Redistribution:
        """Return the redistribution of `all_gather_sequence`."""
        gathered = NamedSharding.replicated(self.mesh, num_dims)
        # Each rank computes with the whole sequence, so its gradient of the gathered tensor is a summand.
        partial = replace(gathered, partial=self.length_axes)
        spec = PartitionSpec(*gathered.spec[:dim], self.length_axes, *gathered.spec[dim + 1 :])
        sharded = NamedSharding(self.mesh, spec)
        return Redistribution((sharded, gathered), (partial, sharded))

    @never_compiled
    def _all_reduce(self, summands: tuple[Tensor | int, ...], axes: tuple[str, ...]) -> tuple[Any, ...]:
        # Summands are packed into one float64 tensor for one collective; integers are exact below 2^53.
        tensors = [torch.as_tensor(summand, device=self.mesh.device_mesh.device_type) for summand in summands]
        packed = torch.cat([tensor.flatten().double() for tensor in tensors])
        # Every rank computes the same loss from the sums, so that its gradient is whole on every rank, and the backward
        # of the all-reduce is the identity.
        total = redistribute_local(packed, Redistribution.reduce_outputs(self.mesh, 1, axes), "sums over tokens")
        sums = torch.split(total, [tensor.numel() for tensor in tensors])
        return tuple(part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(sums, tensors, strict=True))
