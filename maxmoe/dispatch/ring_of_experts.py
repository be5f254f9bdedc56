"""Ring of experts: every rank gets the tokens of all, computes its own experts, and the partial sums are reduced."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.dispatch.collectives import all_gather_rows, reduce_scatter_rows
from maxmoe.dispatch.row_counts import all_gather_counts
from maxmoe.nn.dispatcher import Dispatched, Dispatcher, Pending
from maxmoe.nn.freed_storage import Recomputation
from maxmoe.nn.router import Assignment


class RingState(NamedTuple):
    """Of `RingOfExperts`: what the local dispatcher made of the gathered tokens, and how many each rank has."""

    local: Dispatched
    counts: list[int]


@dataclass(frozen=True)
class RingOfExperts:
    """All-gather of the tokens over the ranks that share the experts, reduce-scatter of the outputs.

    Args:
        local: to the experts of this rank; the same kind on all ranks.
        group: the ranks that share the experts.
        needs_sequences: whether `local` must know where sequences begin.

    Source: MaxText, `use_ring_of_experts`; DeepSpeed-Megatron "AG-RS".
    """

    local: Dispatcher
    group: dist.ProcessGroup
    needs_sequences: bool = False

    def __deepcopy__(self, _memo: object) -> "RingOfExperts":
        """Copies of a layer share the group, which cannot be copied."""
        return self

    def dispatch(self, x: Tensor, assignment: Assignment, num_sequences: int) -> Pending[Dispatched]:
        """See `Dispatcher`."""
        counts, total_sequences = self._counts(x, num_sequences)
        tokens = all_gather_rows(x, counts, self.group)
        weights = all_gather_rows(assignment.weights, counts, self.group)
        experts = all_gather_rows(assignment.experts.to(torch.int32), counts, self.group)

        def arrive() -> Dispatched:
            gathered = Assignment(weights(), experts().to(torch.int64))
            arrived = tokens()
            dispatched = self.local.dispatch(arrived, gathered, total_sequences)()
            again = Recomputation(arrived, lambda x: all_gather_rows(x(), counts, self.group))
            recomputations = (again, *dispatched.recomputations)
            return dispatched._replace(state=RingState(dispatched, counts), recomputations=recomputations)

        return arrive

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """See `Dispatcher`."""
        state: RingState = dispatched.state
        partial_sums = self.local.combine(outputs, state.local)()
        return reduce_scatter_rows(partial_sums, state.counts, self.group)

    def _counts(self, x: Tensor, num_sequences: int) -> tuple[list[int], int]:
        """Return the tokens of every rank, and the sequences of all."""
        sizes = torch.tensor([x.shape[0], num_sequences], device=x.device)
        gathered: list[list[int]] = all_gather_counts(sizes, self.group.group_name)[1].tolist()
        lengths = sorted({num_tokens // number for num_tokens, number in gathered if num_tokens})
        if self.needs_sequences and len(lengths) > 1:
            raise ValueError(f"capacity_factor needs sequences of one length on all ranks, got {lengths}")
        return [num_tokens for num_tokens, _ in gathered], sum(number for _, number in gathered)
