"""Least-loaded experts: ranks with few rows compute rows of other ranks' experts, whose weights they receive."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maxmoe.nn.dispatcher import Future
from maxmoe.nn.local_dispatcher import LocalDispatcher, LocalExperts
from maxmoe.nn.routing import TopK
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

    Nothing is dropped.

    Source: arXiv:2601.17111 (least-loaded expert parallelism).
    """

    local: LocalDispatcher

    @classmethod
    def check(cls, layout: ExpertLayout) -> None:
        """Raise for experts whose rows cannot be computed on several ranks, and for a bound that drops rows."""
        config = layout.config
        if config.implementation != "sparse":
            raise ValueError(
                "least_loaded computes the rows of an expert on several ranks: implementation must be 'sparse', "
                f"got {config.implementation!r}"
            )
        if config.buffer_factor is not None:
            raise ValueError(f"least_loaded drops no rows: buffer_factor must be None, got {config.buffer_factor}")

    def exchange_counts(self, chunks: Sequence[TopK], num_sequences: int) -> list[RaggedCounts]:
        """Sort the slots and all-gather the number of rows for every expert; raise if ranks plan differently."""
        counts = super().exchange_counts(chunks, num_sequences)
        checksums: list[int] = counts[0].facts[:, 1].tolist()
        if len(set(checksums)) > 1:
            raise RuntimeError(
                "least_loaded: all ranks must derive the same plan, got different checksums of what they plan with: "
                + ", ".join(f"rank {rank} {checksum:08x}" for rank, checksum in enumerate(checksums))
                + ". Run the same version of maxmoe, on devices of one type, under the same autocast, on all ranks"
            )
        return counts

    def dispatch(self, x: Tensor, top_k: TopK, counts: RaggedCounts) -> Future[Received[SentRows]]:
        """Start the all-to-all of the rows of x ``(T, D)`` to the ranks that compute them."""
        moves = plan_moves(counts.host_rows.sum(0).tolist(), self.ranks.size, rows_per_expert(x.device.type, x.dtype))
        if not moves:
            return super().dispatch(x, top_k, counts)
        computed, rank = ComputedRows.of(counts.host_rows, moves), self.ranks.group.rank()
        plan = with_rows(counts.plan, computed.order(rank).to(x.device))
        num_sent, num_experts = computed.sent(rank), len(computed.experts[rank])
        splits = Splits(num_sent, num_sent, computed.received(rank))
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

    def _facts(self, chunk: TopK) -> list[int]:
        device = chunk.experts.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        cost = rows_per_expert(device, chunk.weights.dtype)
        settings = (TRIED_PERCENT, cost, self.ranks.first_experts, chunk.weights.dtype, autocast)
        return [*super()._facts(chunk), zlib.crc32(repr(settings).encode())]
