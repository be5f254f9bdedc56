"""Ring of experts: all-gather of the tokens, local experts on every rank, reduce-scatter of the partial sums.

Shapes: T tokens of this rank, K top_k, D hidden_size, P ranks that share the experts, G tokens of all P ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.nn.dispatcher import Dispatcher, Future
from maxmoe.nn.routing import TopK
from maxmoe.parallel.dispatch.collectives import all_gather_counts, all_gather_rows, reduce_scatter_rows
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout
from maxmoe.parallel.dispatch.strategy import OUTPUTS, TOKENS, WEIGHTS, Received, Strategy
from maxmoe.recompute.freed_storage import Recomputation

# Of a chunk: the number of tokens of every rank, and the number of sequences of all ranks.
RingCounts: TypeAlias = tuple[list[int], int]


@dataclass(frozen=True)
class RingOfExperts(Strategy):
    """All-gather of the tokens over the ranks that share the experts, reduce-scatter of the outputs.

    1. Counts: an all-gather of the number of tokens of each rank, once for all chunks.
    2. All-gather: tokens ``(T, D)``, weights and expert ids ``(T, K)`` become ``(G, D)``, ``(G, K)``.
    3. The local dispatcher selects the slots of this rank's experts, which compute them.
    4. The outputs ``(G, D)`` are partial: each rank's sums include its own experts only.
    5. Reduce-scatter: ``(G, D)`` to ``(T, D)``.

    Args:
        local: dispatcher to the experts of this rank, of the same kind on all ranks.
        group: the ranks that share the experts.
        needs_sequences: whether `local` must know where sequences begin.

    Source: MaxText, `use_ring_of_experts`; DeepSpeed-Megatron "AG-RS".
    """

    keeps_sequences = True

    local: Dispatcher[Any, int]
    group: dist.ProcessGroup
    needs_sequences: bool = False

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> "RingOfExperts":
        """Make the dispatcher of this process."""
        return cls(layout.local_dispatcher(), layout.group(), layout.config.capacity_factor is not None)

    def exchange_counts(self, chunks: Sequence[TopK], num_sequences: int) -> list[RingCounts]:
        """All-gather the number of tokens of each chunk, and of sequences: step 1."""
        sizes = [*(chunk.experts.shape[0] for chunk in chunks), num_sequences]
        counts = torch.tensor(sizes, device=chunks[0].experts.device)
        gathered = all_gather_counts(counts, self.group.group_name)[1]
        num_tokens, sequences = gathered[:, :-1], gathered[:, -1].tolist()
        totals = zip(num_tokens.sum(1).tolist(), sequences, strict=True)
        lengths = sorted({total // number for total, number in totals if total})
        if self.needs_sequences and len(lengths) > 1:
            raise ValueError(f"capacity_factor needs sequences of one length on all ranks, got {lengths}")
        return [(tokens, sum(sequences)) for tokens in num_tokens.t().tolist()]

    def dispatch(self, x: Tensor, top_k: TopK, counts: RingCounts) -> Future[Received[list[int]]]:
        """Start the all-gather of x ``(T, D)``, expert ids and weights: steps 2 and 3."""
        num_tokens, num_sequences = counts
        tokens = all_gather_rows(x, num_tokens, self.group, TOKENS)
        weights = all_gather_rows(top_k.weights, num_tokens, self.group, WEIGHTS)
        experts = all_gather_rows(top_k.experts.to(torch.int32), num_tokens, self.group, "expert ids")

        def arrive() -> Received[list[int]]:
            gathered = TopK(weights(), experts().to(torch.int64))
            arrived = tokens()
            again = Recomputation(arrived, lambda x: all_gather_rows(x(), num_tokens, self.group, TOKENS))
            local = self.local.dispatch(arrived, gathered, num_sequences)()
            return Received.of(local, again, local.dropped, num_tokens)

        return arrive

    def combine(self, outputs: Tensor, dispatched: Received[list[int]]) -> Future[Tensor]:
        """Start the reduce-scatter of the outputs: steps 4 and 5."""
        partial_sums = self.local.combine(outputs, dispatched.local)()
        return reduce_scatter_rows(partial_sums, dispatched.sent, self.group, OUTPUTS)
