"""Least-loaded experts: ranks with few rows compute rows of other ranks' experts, whose weights they receive."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maxmoe.nn.dispatcher import Future
from maxmoe.nn.local_dispatcher import LocalDispatcher, LocalExperts
from maxmoe.nn.routing import TopK
from maxmoe.nn.windows import before
from maxmoe.ops import RaggedPlan
from maxmoe.parallel.dispatch.computed_rows import ComputedRows
from maxmoe.parallel.dispatch.expert_moves import TRIED_PERCENT, plan_moves
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout, with_rows
from maxmoe.parallel.dispatch.lent_experts import LentExperts
from maxmoe.parallel.dispatch.ragged_dispatcher import RaggedAllToAll, RaggedCounts, SentRows, Splits
from maxmoe.parallel.dispatch.strategy import Received

# Floating-point operations of a rank, in the time in which it sends a byte to another one, by the type of its device.
# A CPU of two cores through gloo: 1e11 / 1e9. An H100: 4e14 / 4.5e11 over NVLink; between nodes, ten times more.
FLOP_PER_BYTE = {"cpu": 100, "cuda": 1000}


def rows_per_expert(device_type: str, dtype: torch.dtype) -> int:
    """Return the number of rows that a rank computes in the time in which it sends the weights of an expert.

    A row costs six floating-point operations per weight: two in the forward and four in the backward. A weight is sent
    in the forward and again in the backward, and its gradient is sent back: three times its bytes.
    """
    return FLOP_PER_BYTE.get(device_type, FLOP_PER_BYTE["cuda"]) * 3 * dtype.itemsize // 6


@dataclass(frozen=True)
class LeastLoaded(RaggedAllToAll):
    """A `RaggedAllToAll` in which no rank computes many more rows than the mean: the rest goes to ranks with room.

    1. Plan and counts as in `RaggedAllToAll`. The ranks also exchange a checksum of what they plan with.
    2. Every rank derives the same moves from the counts of all ranks: `plan_moves`. If there are none, the chunk is
       dispatched as by `RaggedAllToAll`.
    3. Rows are sent to the ranks that compute them. A rank keeps rows of its own tokens where it can.
    4. The weights of the moved experts are sent while the ranks compute the rows of their own experts: `LentExperts`.
    5. Each rank computes the rows of the foreign experts. Combination as in `RaggedAllToAll`.

    Nothing is dropped. A buffer has windows of the rows that each rank computes after the moves.

    Source: arXiv:2601.17111 (least-loaded expert parallelism).
    """

    local: LocalDispatcher

    @classmethod
    def check(cls, layout: ExpertLayout) -> None:
        """Raise for experts whose rows cannot be computed on several ranks, and for a buffer that drops rows."""
        config = layout.config
        if config.implementation != "sparse":
            raise ValueError(
                "least_loaded computes the rows of an expert on several ranks: implementation must be 'sparse', "
                f"got {config.implementation!r}"
            )
        if config.may_drop:
            raise ValueError(
                f"least_loaded drops no rows: buffer_factor ({config.buffer_factor}) must be None or with "
                f"overflow='chunks', got overflow={config.overflow!r}"
            )

    def _gather_counts(self, chunks: Sequence[TopK], dtype: torch.dtype) -> list[RaggedCounts]:
        """Plan the moves of experts from the counts of all ranks; raise if ranks plan differently."""
        counts = super()._gather_counts(chunks, dtype)
        checksums: list[int] = counts[0].facts[:, 1].tolist()
        if len(set(checksums)) > 1:
            raise RuntimeError(
                "least_loaded: all ranks must derive the same plan, got different checksums of what they plan with: "
                + ", ".join(f"rank {rank} {checksum:08x}" for rank, checksum in enumerate(checksums))
                + ". Run the same version of maxmoe, on devices of one type, under the same autocast, on all ranks"
            )
        cost = rows_per_expert(chunks[0].experts.device.type, dtype)
        return [each._replace(moved=self._moved(each.host_rows, cost)) for each in counts]

    def _moved(self, rows: Tensor, cost: int) -> ComputedRows | None:
        moves = plan_moves(rows.sum(0).tolist(), self.ranks.size, cost)
        return ComputedRows.of(rows, moves) if moves else None

    def _loads(self, counts: RaggedCounts) -> list[int]:
        return super()._loads(counts) if counts.moved is None else counts.moved.loads()

    def dispatch(self, x: Tensor, top_k: TopK, counts: RaggedCounts) -> Future[Received[SentRows]]:
        """Start the all-to-all of the rows of x ``(T, D)`` to the ranks that compute them."""
        if counts.moved is None:
            return super().dispatch(x, top_k, counts)
        moved, window, rank = counts.moved, counts.window, self.ranks.group.rank()
        computed, skipped = moved.within(window), moved.within(before(window))
        splits = Splits(moved.sent(rank), computed.sent(rank), computed.received(rank), skipped.sent(rank))
        plan = splits.sent_part(with_rows(counts.plan, moved.order(rank).to(x.device)))
        num_experts = len(computed.experts[rank])
        local = replace(self.local, experts=LocalExperts(0, num_experts, num_experts, num_experts))
        arriving = self.send(x, top_k, (plan, splits), computed.expert_ids(rank).to(x.device), local)

        def arrive() -> Received[SentRows]:
            dispatched = arriving()
            own, foreign = self._split(dispatched.plan, computed)
            lent = LentExperts(foreign, computed.lent(rank), computed.borrowed(rank), self.ranks.group)
            return replace(dispatched, plan=own, foreign=lent)

        return arrive

    def _split(self, plan: RaggedPlan, computed: ComputedRows) -> tuple[RaggedPlan, RaggedPlan]:
        """Split the plan of all experts that this rank computes into plans of its own and of foreign experts."""
        rank, count = self.ranks.group.rank(), self.ranks.experts.count
        num_rows = int(computed.of_rank(rank)[:, :count].sum())
        own = plan._replace(
            slots=plan.slots[:num_rows],
            rows=torch.where(plan.rows < num_rows, plan.rows, -1),
            group_sizes=plan.group_sizes[:count],
        )
        foreign = plan._replace(
            slots=plan.slots[num_rows:],
            rows=(plan.rows - num_rows).clamp_min(-1),
            group_sizes=plan.group_sizes[count:],
        )
        return own, foreign

    def _facts(self, chunk: TopK, dtype: torch.dtype) -> list[int]:
        device = chunk.experts.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        cost = rows_per_expert(device, dtype)
        settings = (TRIED_PERCENT, cost, self.ranks.first_experts, chunk.weights.dtype, autocast)
        return [*super()._facts(chunk, dtype), zlib.crc32(repr(settings).encode())]
