"""Distribution of the experts over ranks, and the order of rows by rank and expert."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.nn import local_dispatcher
from maxmoe.nn.dispatcher import Dispatcher
from maxmoe.nn.local_dispatcher import LocalCounts, LocalExperts
from maxmoe.nn.routing import TopK
from maxmoe.nn.windows import Buffer
from maxmoe.ops import RaggedPlan, ragged_plan
from maxmoe.parallel.dispatch.agreed_windows import LargestOnMesh
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding, PartitionSpec


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Mesh axes over which the experts of a layer are sharded.

    Args:
        expert_axes: axes over which the experts are sharded, the major axis first.
        token_axes: subset of `expert_axes` over which tokens are communicated. Along the other axes, all ranks hold the
            same tokens.
    """

    config: MoEConfig
    mesh: Mesh
    expert_axes: tuple[str, ...] = ()
    token_axes: tuple[str, ...] = ()

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Axes over which the strategy communicates: those that shard the tokens, or all expert axes without such."""
        return self.token_axes or self.expert_axes

    @property
    def num_local_experts(self) -> int:
        """Number of experts of a rank."""
        return self.config.num_experts // self.mesh.size(*self.expert_axes)

    def local_experts(self, rank: int | None = None) -> LocalExperts:
        """Return the experts of a rank; None for this process."""
        total = self.config.num_experts
        (part,) = NamedSharding(self.mesh, PartitionSpec(self.expert_axes)).slices((total,), rank)
        return LocalExperts(part.start, part.stop - part.start, total, self.config.num_selectable_experts)

    def local_dispatcher(self, *, is_bounded: bool = True) -> Dispatcher[Any, LocalCounts]:
        """Make the dispatcher to the experts of this process; unbounded if the strategy itself bounds the rows."""
        config = self.config if is_bounded else replace(self.config, buffer_factor=None, overflow="drop")
        return local_dispatcher(config, self.local_experts(), self.agreement(()))

    def agreement(self, exchanged: tuple[str, ...]) -> LargestOnMesh | None:
        """Return how ranks agree on numbers of windows that those along the axes `exchanged` know of each other."""
        axes = tuple(axis for axis in self.mesh.axes if axis not in exchanged)
        return LargestOnMesh(self.mesh, axes) if axes else None

    def group(self) -> dist.ProcessGroup:
        """Return the group of this process in which a strategy communicates."""
        return self.mesh.process_group(*self.group_axes)

    def ranks(self) -> "ExpertRanks":
        """Return the ranks of the group with their experts."""
        first_experts = tuple(self.local_experts(rank).first for rank in self.mesh.ranks_along(*self.group_axes))
        buffer = Buffer.of(self.config, self.agreement(self.group_axes))
        return ExpertRanks(self.group(), self.local_experts(), first_experts, buffer)


@dataclass(frozen=True)
class ExpertRanks:
    """Ranks over which the experts of a layer are sharded, with the same number of experts on each rank.

    Args:
        group: process group of the ranks.
        experts: experts of this rank.
        first_experts: index of the first expert of each rank of the group.
        buffer: bound on the rows of a rank; None for no bound.
    """

    group: dist.ProcessGroup
    experts: LocalExperts
    first_experts: tuple[int, ...]
    buffer: Buffer | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.first_experts)

    def plan(self, top_k: TopK) -> RaggedPlan:
        """Sort the slots by the rank of their expert and by expert; slots of experts outside of the group have no row.

        The groups of the plan are the experts in the order of the ranks.
        """
        experts, count, total = top_k.experts, self.experts.count, self.experts.total
        are_all = self.size * count == total
        num_rows = experts.numel() if top_k.is_unpadded and are_all and self.experts.are_selectable else None
        num_ids = self.experts.num_selectable
        # If only some expert axes shard the tokens, the group lacks experts or has them in another order.
        if self.first_experts != tuple(range(0, total, count)):
            experts, num_ids = self._position_of_expert(experts.device)[experts], self.size * count
        return ragged_plan(experts, num_ids, num_local_experts=self.size * count, num_rows=num_rows)

    def rows_of_ranks(self, top_k: TopK) -> Tensor:
        """Count the rows ``(P,)`` of the experts of each rank."""
        position = self._position_of_expert(top_k.experts.device)[top_k.experts.flatten()]
        rank = torch.where(position < 0, self.size, position // self.experts.count)
        return rank.new_zeros(self.size + 1).scatter_add(0, rank, torch.ones_like(rank))[: self.size]

    def _position_of_expert(self, device: torch.device) -> Tensor:
        """Return the index of each expert in the order of the ranks, and -1 for experts of other ranks or of none.

        The last entry is -1 as well: the id -1 of a slot that is not routed indexes it.
        """
        position = torch.full((self.experts.num_selectable + 1,), -1, device=device)
        for rank, first in enumerate(self.first_experts):
            position[first : first + self.experts.count] = torch.arange(self.experts.count) + rank * self.experts.count
        return position


def rows_to_send(routed: list[int], skip: list[int], send: list[int]) -> Tensor:
    """Return the numbers ``(R,)`` of the rows that are sent, of those `routed` to each rank: `send` after `skip`."""
    ends = list(accumulate(routed))
    starts = [end - count + skipped for end, count, skipped in zip(ends, routed, skip, strict=True)]
    return torch.cat([torch.arange(start, start + count) for start, count in zip(starts, send, strict=True)])


def with_rows(plan: RaggedPlan, rows: Tensor) -> RaggedPlan:
    """Return a plan with the rows of the given numbers ``(R,)``, in their order. `group_sizes` are not changed."""
    slots = plan.slots[rows]
    places = torch.full_like(plan.rows, -1).scatter(0, slots, torch.arange(len(slots), device=slots.device))
    return plan._replace(slots=slots, rows=places)
