"""What a layer with least-loaded experts would send at a given imbalance, without running a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from maxmoe.parallel.dispatch.computed_rows import ComputedRows
from maxmoe.parallel.dispatch.expert_moves import Move, loads_of, plan_moves
from maxmoe.parallel.dispatch.planned_dispatch import PlannedDispatch
from maxmoe.sharding.planned_collective import PlannedCollective


@dataclass(frozen=True)
class PlannedMoves:
    """Moves of one chunk, if all ranks route alike and one expert has all rows above an even load.

    Args:
        tokens: tokens of the chunk.
        rows: ``(P, E)``, int64, number of rows of each rank for each expert, in the order of the ranks.
        moves: moves of experts to other ranks.
    """

    tokens: PlannedDispatch
    rows: Tensor
    moves: tuple[Move, ...]

    @classmethod
    def of(cls, tokens: PlannedDispatch, rows_per_expert: int) -> "PlannedMoves":
        """Plan the moves at the imbalance of the layout of the tokens."""
        rows = routed_rows(tokens).expand(tokens.num_ranks, -1)
        return cls(tokens, rows, plan_moves(rows.sum(0).tolist(), tokens.num_ranks, rows_per_expert))

    @property
    def most_rows(self) -> float:
        """Most rows of a rank over the mean."""
        loads = loads_of(self.rows.sum(0).tolist(), self.tokens.num_ranks, self.moves)
        return max(loads) * len(loads) / max(1, sum(loads))

    def collectives(self) -> Iterator[PlannedCollective]:
        """List the collectives of rows, weights and gradients, each with the bytes of the rank that sends most."""
        tokens, computed = self.tokens, ComputedRows.of(self.rows, self.moves)
        row = self._most(computed.sent, computed.received)
        size = tokens.config.row_size * tokens.dtype.itemsize
        yield from tokens.exchange("tokens to experts", row * size, is_input=True)
        yield from tokens.exchange("routing weights", row * tokens.weights_dtype.itemsize)
        yield from tokens.exchange("outputs of experts", row * size)
        if self.moves:
            experts = self._most(lambda rank: list(map(len, computed.lent(rank))), computed.borrowed)
            for num_bytes, is_trained in tokens.expert_bytes:
                # Sent again in the backward, whether the layer is recomputed or the weights are freed in between.
                yield from tokens.exchange(
                    "weights of moved experts", experts * num_bytes, has_gradient=is_trained, is_sent_again=True
                )

    def _most(self, sent: Callable[[int], list[int]], received: Callable[[int], list[int]]) -> int:
        """Return the largest number that a rank sends to other ranks, or receives from them."""
        counts = ((rank, count(rank)) for count in (sent, received) for rank in range(self.tokens.num_ranks))
        return max(sum(parts) - parts[rank] for rank, parts in counts)


def routed_rows(tokens: PlannedDispatch) -> Tensor:
    """Return the number of rows ``(E,)`` of a rank for each expert of the group.

    Each rank sends a share of its rows to the first expert, and the others to all experts alike. With the share
    (imbalance - 1) / (P - 1), the rank of the first expert has `imbalance` times the mean number of rows: all rows of
    the first expert if the imbalance is P.
    """
    count, num_experts = tokens.num_group_rows, tokens.num_group_experts
    hot = round(count * (tokens.layout.imbalance - 1) / max(1, tokens.num_ranks - 1))
    rows = torch.full((num_experts,), (count - hot) // num_experts)
    rows[: (count - hot) % num_experts] += 1
    rows[0] += hot
    return rows
