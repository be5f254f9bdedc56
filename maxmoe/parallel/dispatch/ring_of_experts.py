"""Ring of experts: all-gather of the tokens, local experts on every rank, reduce-scatter of the partial sums.

Shapes: T tokens of this rank, K top_k, D hidden_size, P ranks that share the experts, G tokens of all P ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxmoe.nn.dispatcher import Dispatcher, Future
from maxmoe.nn.local_dispatcher import LocalCounts
from maxmoe.nn.routing import TopK
from maxmoe.nn.windows import Window, Windows
from maxmoe.parallel.dispatch.collectives import all_gather_counts, all_gather_rows, reduce_scatter_rows
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout, ExpertRanks
from maxmoe.parallel.dispatch.strategy import OUTPUTS, TOKENS, WEIGHTS, Received, Strategy
from maxmoe.recompute.freed_storage import Recomputation


class RingCounts(NamedTuple):
    """Counts of a chunk.

    Attributes:
        num_tokens: number of tokens of every rank.
        num_sequences: number of sequences of all ranks.
        window: rows of each rank that are computed; None for all rows.
    """

    num_tokens: list[int]
    num_sequences: int
    window: Window | None = None


@dataclass(frozen=True)
class RingOfExperts(Strategy):
    """All-gather of the tokens over the ranks that share the experts, reduce-scatter of the outputs.

    1. Counts: an all-gather of the number of tokens of each rank, once for all chunks; if a buffer has several windows,
       also of the number of rows for the experts of each rank. Each window then takes the steps 2 to 5.
    2. All-gather: tokens ``(T, D)``, weights and expert ids ``(T, K)`` become ``(G, D)``, ``(G, K)``.
    3. The local dispatcher selects the slots of this rank's experts, which compute them.
    4. The outputs ``(G, D)`` are partial: each rank's sums include its own experts only.
    5. Reduce-scatter: ``(G, D)`` to ``(T, D)``.

    Args:
        local: dispatcher to the experts of this rank, of the same kind on all ranks.
        ranks: the ranks that share the experts.
        needs_sequences: whether `local` must know where sequences begin.

    Source: MaxText, `use_ring_of_experts`; DeepSpeed-Megatron "AG-RS".
    """

    keeps_sequences = True

    local: Dispatcher[Any, LocalCounts]
    ranks: ExpertRanks
    needs_sequences: bool = False

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> "RingOfExperts":
        """Make the dispatcher of this process."""
        return cls(layout.local_dispatcher(), layout.ranks(), layout.config.capacity_factor is not None)

    def exchange_counts(
        self, chunks: Sequence[TopK], num_sequences: int, dtype: torch.dtype
    ) -> Sequence[RingCounts | Windows[RingCounts]]:
        """All-gather the number of tokens of each chunk, and of sequences: step 1."""
        device, buffer = chunks[0].experts.device, self.ranks.buffer
        counts = [torch.tensor([*(chunk.experts.shape[0] for chunk in chunks), num_sequences], device=device)]
        if buffer is not None and not buffer.drops:
            counts += map(self.ranks.rows_of_ranks, chunks)
        _, gathered = all_gather_counts(torch.cat(counts), self.ranks.group.group_name)
        num_tokens, sequences, rows = gathered.tensor_split([len(chunks), len(chunks) + 1], dim=1)
        self._check_lengths(num_tokens.sum(1).tolist(), sequences.flatten().tolist())
        of_chunks = [RingCounts(tokens, int(sequences.sum())) for tokens in num_tokens.t().tolist()]
        if buffer is None or buffer.drops:
            return of_chunks
        num_slots = num_tokens.sum(0) * chunks[0].experts.shape[1]
        means = [self.ranks.experts.mean_rows(number) for number in num_slots.tolist()]
        most: list[int] = rows.sum(0).view(len(chunks), self.ranks.size).amax(1).tolist()
        return buffer.in_windows(of_chunks, most, means, device)

    def _check_lengths(self, num_tokens: list[int], num_sequences: list[int]) -> None:
        totals = zip(num_tokens, num_sequences, strict=True)
        lengths = sorted({total // number for total, number in totals if total})
        if self.needs_sequences and len(lengths) > 1:
            raise ValueError(f"capacity_factor needs sequences of one length on all ranks, got {lengths}")

    def dispatch(self, x: Tensor, top_k: TopK, counts: RingCounts) -> Future[Received[list[int]]]:
        """Start the all-gather of x ``(T, D)``, expert ids and weights: steps 2 and 3."""
        num_tokens, of_all = counts.num_tokens, LocalCounts(counts.num_sequences, counts.window)
        tokens = all_gather_rows(x, num_tokens, self.ranks.group, TOKENS)
        weights = all_gather_rows(top_k.weights, num_tokens, self.ranks.group, WEIGHTS)
        experts = all_gather_rows(top_k.experts.to(torch.int32), num_tokens, self.ranks.group, "expert ids")

        def arrive() -> Received[list[int]]:
            gathered = TopK(weights(), experts().to(torch.int64))
            arrived = tokens()
            again = Recomputation(arrived, lambda x: all_gather_rows(x(), num_tokens, self.ranks.group, TOKENS))
            local = self.local.dispatch(arrived, gathered, of_all)()
            return Received.of(local, again, local.dropped, num_tokens)

        return arrive

    def combine(self, outputs: Tensor, dispatched: Received[list[int]]) -> Future[Tensor]:
        """Start the reduce-scatter of the outputs: steps 4 and 5."""
        partial_sums = self.local.combine(outputs, dispatched.local)()
        return reduce_scatter_rows(partial_sums, dispatched.sent, self.ranks.group, OUTPUTS)
