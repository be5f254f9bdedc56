"""How tokens reach their experts, and how the outputs of a token's experts become one row again."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.nn.router import Routing
from maxmoe.ops import RaggedPlan, ragged_plan, ragged_sort, ragged_unsort


class Dispatched(NamedTuple):
    """What `Experts` compute, and what `combine` needs afterwards.

    Attributes:
        x: ``(N, D)``; tokens, or rows that are in the order of the experts already.
        weights: ``(N, K)``, None for ones; multiplied with the outputs inside of `Experts`.
        plan: which rows of x go to which expert.
        dropped: ``()``, int64; slots that were left out.
        state: of the dispatcher.
    """

    x: Tensor
    weights: Tensor | None
    plan: RaggedPlan
    dropped: Tensor
    state: Any = None


class Dispatcher(Protocol):
    """A way for tokens to their experts and back."""

    def dispatch(self, x: Tensor, routing: Routing, num_sequences: int) -> Dispatched:
        """Bring tokens to their experts.

        Args:
            x: ``(T, D)``, floating; sequences of equal length, one after the other.
            routing: of x.
            num_sequences: B.

        Returns:
            The input of `Experts`.
        """
        ...

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring the outputs of the experts back to their tokens.

        Args:
            outputs: ``(N, D)``, of `Experts`.
            dispatched: their input.

        Returns:
            ``(T, D)``, the weighted sum over each token's experts.
        """
        ...


@dataclass(frozen=True)
class LocalDispatcher:
    """All experts are in this process: nothing moves but rows in memory."""

    config: MoEConfig

    def dispatch(self, x: Tensor, routing: Routing, num_sequences: int) -> Dispatched:
        """See `Dispatcher`."""
        plan = self._plan(routing)
        if self.config.apply_weights_to == "output":  # `expert_ffn` sorts, multiplies and sums by itself
            return Dispatched(x, routing.weights, plan, plan.dropped)
        rows = ragged_sort(x, plan, routing.weights)
        return Dispatched(rows, None, RaggedPlan.of_sorted_rows(rows.shape[0], plan.group_sizes), plan.dropped, plan)

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher`."""
        plan: RaggedPlan | None = dispatched.state
        return outputs if plan is None else ragged_unsort(outputs, plan)

    def _plan(self, routing: Routing) -> RaggedPlan:
        num_slots, factor = routing.experts.numel(), self.config.buffer_factor
        max_rows = None if factor is None else int(num_slots * factor)
        num_rows = None
        if routing.is_complete:
            num_rows = num_slots if max_rows is None else min(num_slots, max_rows)
        return ragged_plan(routing.experts, self.config.num_experts, max_rows=max_rows, num_rows=num_rows)
