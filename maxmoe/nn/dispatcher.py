"""How tokens reach their experts, and how the outputs of a token's experts become one row again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.nn.freed_storage import Recomputation, Recomputed
from maxmoe.nn.router import Assignment
from maxmoe.ops import RaggedPlan, ragged_plan, ragged_sort, ragged_unsort

T = TypeVar("T")

# A value that communication may still be bringing: calling it waits.
Pending: TypeAlias = Callable[[], T]


class Dispatched(NamedTuple):
    """What `Experts` compute, and what `combine` needs afterwards.

    Attributes:
        x: ``(N, D)``; tokens, or rows that are in the order of the experts already.
        weights: ``(N, K)``, None for ones; multiplied with the outputs inside of `Experts`.
        plan: which rows of x go to which expert.
        dropped: ``()``, int64; slots that were left out.
        state: of the dispatcher.
        recomputations: of what autograd saves on the way to x, the first from the input of `dispatch`, and of x.
    """

    x: Tensor
    weights: Tensor | None
    plan: RaggedPlan
    dropped: Tensor
    state: Any = None
    recomputations: tuple[Recomputation, ...] = ()


class Dispatcher(Protocol):
    """A way for tokens to their experts and back."""

    def dispatch(self, x: Tensor, assignment: Assignment, num_sequences: int) -> Pending[Dispatched]:
        """Start to bring tokens to their experts.

        Args:
            x: ``(T, D)``, floating; sequences of equal length, one after the other.
            assignment: of x.
            num_sequences: B.

        Returns:
            The input of `Experts`.
        """
        ...

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """Start to bring the outputs of the experts back to their tokens.

        Args:
            outputs: ``(N, D)``, of `Experts`.
            dispatched: their input.

        Returns:
            ``(T, D)``, the weighted sum over each token's experts.
        """
        ...


def run_experts(
    dispatcher: Dispatcher,
    experts: Callable[[Tensor, Tensor | None, RaggedPlan], Tensor],
    x: Tensor,
    assignment: Assignment,
    *,
    num_sequences: int,
    num_chunks: int = 1,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Bring tokens to their experts, compute these, and bring the outputs back.

    While the experts compute a chunk, the next one is on its way to them and the last one on its way back. Autograd
    runs the backward in the opposite order, with the same overlap.

    Args:
        dispatcher: of tokens to experts, and back.
        experts: called once for each chunk.
        x: ``(T, D)``, floating.
        assignment: of x.
        num_sequences: B.
        num_chunks: parts of the tokens, as equal as they can be; more than one only where sequences do not matter.
        recompute: free between forward and backward what the dispatcher can bring again.

    Returns:
        ``(T, D)``, and the number ``()`` of dropped slots.
    """
    tokens, assignments = x.tensor_split(num_chunks), assignment.tensor_split(num_chunks)
    arriving = dispatcher.dispatch(tokens[0], assignments[0], num_sequences)
    returning, dropped, recomputed = [], [], []
    for index in range(num_chunks):
        dispatched = arriving()
        if index + 1 < num_chunks:
            arriving = dispatcher.dispatch(tokens[index + 1], assignments[index + 1], num_sequences)
        outputs = experts(dispatched.x, dispatched.weights, dispatched.plan)
        returning.append(dispatcher.combine(outputs, dispatched))
        dropped.append(dispatched.dropped)
        if recompute:
            recomputed.append(Recomputed(tokens[index], dispatched.recomputations, outputs))
    combined = [chunk() for chunk in returning]
    for part, chunk in zip(recomputed, combined, strict=recompute):
        part.start_before_backward_of(chunk)
    if num_chunks == 1:
        return combined[0], dropped[0]
    return torch.cat(combined), torch.stack(dropped).sum()


@dataclass(frozen=True)
class LocalExperts:
    """The experts in this process, of all those of a layer.

    Args:
        first: index of the first one.
        count: L, how many.
        total: E, of the layer.
    """

    first: int
    count: int
    total: int

    @classmethod
    def all_of(cls, config: MoEConfig) -> "LocalExperts":
        """Return those of a layer that one process runs."""
        return cls(0, config.num_experts, config.num_experts)

    def max_rows(self, num_slots: int, factor: float | None) -> int | None:
        """Return how many rows a process takes of the slots of some tokens.

        Args:
            num_slots: of the tokens, for experts anywhere.
            factor: of the mean over the processes; None for no bound.

        Returns:
            The rows, None for all.
        """
        return None if factor is None else int(num_slots * self.count // self.total * factor)

    @property
    def are_all(self) -> bool:
        """Whether no expert is elsewhere."""
        return self.count == self.total


@dataclass(frozen=True)
class LocalDispatcher:
    """The tokens are in the process of their experts: nothing moves but rows in memory.

    With a part of the experts, the sums over each token's experts are those over this part: partial sums.
    """

    config: MoEConfig
    experts: LocalExperts

    def dispatch(self, x: Tensor, assignment: Assignment, num_sequences: int) -> Pending[Dispatched]:
        """See `Dispatcher`."""
        plan = self._plan(assignment)
        if self.config.apply_weights_to == "output":  # `expert_ffn` sorts, multiplies and sums by itself
            dispatched = Dispatched(x, assignment.weights, plan, plan.dropped)
        else:
            rows = ragged_sort(x, plan, assignment.weights)
            sorted_plan = RaggedPlan.of_sorted_rows(rows.shape[0], plan.group_sizes)
            again = Recomputation(rows, lambda x: lambda: ragged_sort(x(), plan, assignment.weights))
            dispatched = Dispatched(rows, None, sorted_plan, plan.dropped, plan, (again,))
        return lambda: dispatched

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """See `Dispatcher`."""
        plan: RaggedPlan | None = dispatched.state
        combined = outputs if plan is None else ragged_unsort(outputs, plan)
        return lambda: combined

    def _plan(self, assignment: Assignment) -> RaggedPlan:
        num_slots = assignment.experts.numel()
        max_rows = self.experts.max_rows(num_slots, self.config.buffer_factor)
        num_rows = None
        if self.experts.are_all:
            # The slots are a bound that drops nothing, but says how many rows there can be.
            max_rows = num_slots if max_rows is None else min(num_slots, max_rows)
            num_rows = max_rows if assignment.is_complete else None
        return ragged_plan(
            assignment.experts,
            self.experts.total,
            first_expert=self.experts.first,
            num_local_experts=self.experts.count,
            max_rows=max_rows,
            num_rows=num_rows,
        )
