"""How tokens reach their experts, and how the outputs of a token's experts become one row again.

Shapes: T tokens of this process, K top_k, D hidden_size, N rows of the experts' input, E experts, L local experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.nn.router import TopK
from maxmoe.nn.tensor_parallel_region import LocalRegion, TensorParallelRegion
from maxmoe.ops import RaggedPlan, ragged_plan, ragged_sort, ragged_unsort
from maxmoe.recompute.freed_storage import Recomputation, Rematerialized

T = TypeVar("T")

# A result that a collective may still compute: the call waits for it.
Future: TypeAlias = Callable[[], T]


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """The input of the experts. Each dispatcher derives a type with what its `combine` needs.

    Attributes:
        x: ``(N, D)``; tokens, or rows that are in the order of the experts already.
        weights: ``(N, K)``, None for ones; multiplied with the outputs inside of `Experts`.
        plan: which rows of x go to which expert.
        dropped: ``()``, int64, number of slots that were left out.
        recomputations: of what autograd saves on the way to x, the first from the input of `dispatch`, and of x.
    """

    x: Tensor
    weights: Tensor | None
    plan: RaggedPlan
    dropped: Tensor
    recomputations: tuple[Recomputation, ...] = ()


D = TypeVar("D", bound=Dispatched)


class Dispatcher(Protocol[D]):
    """A way for tokens to their experts and back: `LocalDispatcher`, or a strategy of `maxmoe.dispatch`."""

    def dispatch(self, x: Tensor, top_k: TopK, num_sequences: int) -> Future[D]:
        """Start to bring tokens to their experts.

        Args:
            x: ``(T, D)``, floating; sequences of equal length, one after the other.
            top_k: expert ids and weights of x.
            num_sequences: B, number of sequences in x.

        Returns:
            A function that waits for the input of `Experts`.
        """
        ...

    def combine(self, outputs: Tensor, dispatched: D) -> Future[Tensor]:
        """Start to bring the outputs of the experts back to their tokens.

        Args:
            outputs: ``(N, D)``, of `Experts`.
            dispatched: what `dispatch` has returned.

        Returns:
            A function that waits for ``(T, D)``, the weighted sum over each token's experts.
        """
        ...


@dataclass(frozen=True)
class ExpertRunner:
    """Runs the routed experts of a layer: dispatch, experts, combine.

    One process needs a local dispatcher alone. `maxmoe.parallelize` gives every layer a runner for its mesh.

    Args:
        dispatcher: brings tokens to experts and back.
        region: where processes compute parts of the layer for the same tokens.
        num_chunks: parts of the tokens, as equal as they can be; more than one only where sequences do not matter.
    """

    dispatcher: Dispatcher[Any]
    region: TensorParallelRegion = field(default_factory=LocalRegion)
    num_chunks: int = 1

    def run(
        self,
        experts: Callable[[Tensor, Tensor | None, RaggedPlan], Tensor],
        x: Tensor,
        top_k: TopK,
        *,
        num_sequences: int = 1,
        recompute: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Bring tokens to their experts, compute these, and bring the outputs back.

        While the experts compute a chunk, the next chunk is sent to them and the last one is sent back. Autograd runs
        the backward in the opposite order, with the same overlap.

        Args:
            experts: called once for each chunk.
            x: ``(T, D)``, floating.
            top_k: expert ids and weights of x.
            num_sequences: B, number of sequences in x.
            recompute: whether to free what the dispatcher can recompute, between forward and backward.

        Returns:
            ``(T, D)``, and the number ``()`` of dropped slots.
        """
        dispatch, combine = self.dispatcher.dispatch, self.dispatcher.combine
        tokens, top_k_chunks = x.tensor_split(self.num_chunks), top_k.tensor_split(self.num_chunks)
        arriving = dispatch(tokens[0], top_k_chunks[0], num_sequences)
        returning, dropped, recomputed = [], [], []
        for index in range(self.num_chunks):
            dispatched = arriving()
            if index + 1 < self.num_chunks:
                arriving = dispatch(tokens[index + 1], top_k_chunks[index + 1], num_sequences)
            outputs = experts(dispatched.x, dispatched.weights, dispatched.plan)
            returning.append(combine(outputs, dispatched))
            dropped.append(dispatched.dropped)
            if recompute:
                recomputed.append(Rematerialized(tokens[index], dispatched.recomputations, outputs))
        combined = [chunk() for chunk in returning]
        for part, chunk in zip(recomputed, combined, strict=recompute):
            part.start_before_backward_of(chunk)
        if self.num_chunks == 1:
            return combined[0], dropped[0]
        return torch.cat(combined), torch.stack(dropped).sum()


@dataclass(frozen=True)
class LocalExperts:
    """The range of a layer's experts that are in this process.

    Args:
        first: index of the first one.
        count: L.
        total: E.
    """

    first: int
    count: int
    total: int

    @classmethod
    def all_of(cls, config: MoEConfig) -> "LocalExperts":
        """Return the range of all experts of a layer."""
        return cls(0, config.num_experts, config.num_experts)

    def max_rows(self, num_slots: int, factor: float | None) -> int | None:
        """Return the bound of `buffer_factor` on the rows of a process.

        Args:
            num_slots: number of slots of all processes.
            factor: multiple of the mean over the processes; None for no bound.

        Returns:
            The number of rows, None for no bound.
        """
        return None if factor is None else int(num_slots * self.count // self.total * factor)

    @property
    def are_all(self) -> bool:
        """Whether no expert is in another process."""
        return self.count == self.total


@dataclass(frozen=True, kw_only=True)
class LocallyDispatched(Dispatched):
    """Attributes: sorting: the plan by which rows were sorted before the experts; None if `expert_ffn` sorts them."""

    sorting: RaggedPlan | None = None


@dataclass(frozen=True)
class LocalDispatcher:
    """Dispatch to experts in the process of the tokens. With a part of the experts, it returns partial sums.

    1. Plan: a counting sort of the slots by expert.
    2. Weights multiply outputs: `expert_ffn` gathers rows ``(N, D)`` of x, multiplies and sums by itself.
       Weights multiply inputs: rows are gathered and scaled here, and summed in `combine`.

    Args:
        experts: the experts in this process.
        scales_input: whether the weights multiply the input of the experts.
        buffer_factor: bounds the number of rows; None for no bound.
    """

    experts: LocalExperts
    scales_input: bool = False
    buffer_factor: float | None = None

    def dispatch(self, x: Tensor, top_k: TopK, num_sequences: int) -> Future[LocallyDispatched]:
        """Sort the slots of x ``(T, D)``; return the function that returns the input of the experts."""
        plan = self._plan(top_k)
        if not self.scales_input:
            dispatched = LocallyDispatched(x=x, weights=top_k.weights, plan=plan, dropped=plan.dropped)
            return lambda: dispatched
        rows = ragged_sort(x, plan, top_k.weights)
        scaled = LocallyDispatched(
            x=rows,
            weights=None,
            plan=RaggedPlan.of_sorted_rows(rows.shape[0], plan.group_sizes),
            dropped=plan.dropped,
            recomputations=(Recomputation(rows, lambda x: lambda: ragged_sort(x(), plan, top_k.weights)),),
            sorting=plan,
        )
        return lambda: scaled

    def combine(self, outputs: Tensor, dispatched: LocallyDispatched) -> Future[Tensor]:
        """Sum outputs ``(N, D)`` that are still in the order of the experts."""
        combined = outputs if dispatched.sorting is None else ragged_unsort(outputs, dispatched.sorting)
        return lambda: combined

    def _plan(self, top_k: TopK) -> RaggedPlan:
        num_slots = top_k.experts.numel()
        max_rows = self.experts.max_rows(num_slots, self.buffer_factor)
        num_rows = None
        if self.experts.are_all:
            # The slots are a bound that drops nothing, but says how many rows there can be.
            max_rows = num_slots if max_rows is None else min(num_slots, max_rows)
            num_rows = max_rows if top_k.is_unpadded else None
        return ragged_plan(
            top_k.experts,
            self.experts.total,
            first_expert=self.experts.first,
            num_local_experts=self.experts.count,
            max_rows=max_rows,
            num_rows=num_rows,
        )
