"""Dispatch of tokens to their experts, and combination of the outputs of each token's experts.

Shapes: T tokens of this process, K top_k, D hidden_size, N rows of the experts' input, E experts, L local experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.nn.routing import TopK
from maxmoe.nn.tensor_parallel_region import LocalRegion, TensorParallelRegion
from maxmoe.ops import RaggedPlan, ragged_plan, ragged_sort, ragged_unsort
from maxmoe.recompute.freed_storage import Recomputation, Rematerialized

T = TypeVar("T")

# Function that waits for a result, such as the output of a collective, and returns it.
Future: TypeAlias = Callable[[], T]


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Input of the experts. Each dispatcher has a subclass with the tensors that its `combine` needs.

    Attributes:
        x: ``(N, D)``, tokens, or rows that are sorted by expert.
        weights: ``(N, K)``, routing weights that `Experts` multiplies with the outputs; None for ones.
        plan: rows of x that each expert computes.
        dropped: ``()``, int64, number of dropped slots.
        recomputations: recomputations of the tensors that autograd saves between the input of `dispatch` and x, in
            order. The first one starts from the input of `dispatch`, the last one computes x.
    """

    x: Tensor
    weights: Tensor | None
    plan: RaggedPlan
    dropped: Tensor
    recomputations: tuple[Recomputation, ...] = ()

    def compute(self, experts: Callable[..., Tensor]) -> Tensor:
        """Call `Experts`, or a function with the same arguments, with this input."""
        return experts(self.x, self.weights, self.plan)


D = TypeVar("D", bound=Dispatched)
C = TypeVar("C")


class Dispatcher(Protocol[D, C]):
    """Interface of dispatchers, such as `LocalDispatcher` and the strategies of `maxmoe.parallel.dispatch`."""

    def exchange_counts(self, chunks: Sequence[TopK], num_sequences: int) -> Sequence[C]:
        """Exchange the counts that processes must know of each other, once for all chunks of the tokens.

        Args:
            chunks: expert ids and routing weights of each chunk.
            num_sequences: B, number of sequences in all chunks.

        Returns:
            Counts of each chunk, for `dispatch`.
        """
        ...

    def dispatch(self, x: Tensor, top_k: TopK, counts: C, /) -> Future[D]:
        """Start the dispatch of a chunk of tokens to their experts.

        Args:
            x: ``(T, D)``, floating, tokens of B sequences of equal length, one sequence after the other.
            top_k: expert ids and routing weights of the tokens.
            counts: counts of the chunk, from `exchange_counts`.

        Returns:
            Function that waits for the input of `Experts` and returns it.
        """
        ...

    def combine(self, outputs: Tensor, dispatched: D) -> Future[Tensor]:
        """Start the combination of the outputs of the experts.

        Args:
            outputs: ``(N, D)``, outputs of `Experts`.
            dispatched: input of `Experts` that `dispatch` returned.

        Returns:
            Function that waits for ``(T, D)``, the weighted sum over the experts of each token, and returns it.
        """
        ...


@dataclass(frozen=True)
class ExpertRunner:
    """Runs the routed experts of a layer: dispatch, experts, combine.

    A layer in one process has a runner with a local dispatcher. `maxmoe.parallelize` sets a runner for the mesh.

    Args:
        dispatcher: dispatcher of the layer.
        region: tensor-parallel region, for processes that compute parts of the layer for the same tokens.
        num_chunks: number of chunks into which the tokens are split. Must be one for a dispatcher that needs whole
            sequences.
    """

    dispatcher: Dispatcher[Any, Any]
    region: TensorParallelRegion = field(default_factory=LocalRegion)
    num_chunks: int = 1

    def run(
        self,
        experts: Callable[..., Tensor],
        x: Tensor,
        top_k: TopK,
        *,
        num_sequences: int = 1,
        recompute: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Dispatch tokens to their experts, compute the experts, and combine their outputs.

        While the experts compute a chunk, the next chunk is dispatched and the previous one is combined. Autograd runs
        the backward in reverse order, with the same overlap.

        Args:
            experts: `Experts`, or a function with the arguments of its forward; called once per chunk.
            x: ``(T, D)``, floating, tokens.
            top_k: expert ids and routing weights of the tokens.
            num_sequences: B, number of sequences in x.
            recompute: whether tensors that the dispatcher can recompute are freed between forward and backward.

        Returns:
            Combined outputs ``(T, D)`` and the number ``()`` of dropped slots.
        """
        dispatch, combine = self.dispatcher.dispatch, self.dispatcher.combine
        tokens, top_k_chunks = x.tensor_split(self.num_chunks), top_k.tensor_split(self.num_chunks)
        counts = self.dispatcher.exchange_counts(top_k_chunks, num_sequences)
        arriving = dispatch(tokens[0], top_k_chunks[0], counts[0])
        returning, dropped, recomputed = [], [], []
        for index in range(self.num_chunks):
            dispatched = arriving()
            # The dispatch of the next chunk starts before the experts compute this one, so that the two overlap.
            if index + 1 < self.num_chunks:
                arriving = dispatch(tokens[index + 1], top_k_chunks[index + 1], counts[index + 1])
            outputs = dispatched.compute(experts)
            returning.append(combine(outputs, dispatched))
            dropped.append(dispatched.dropped)
            if recompute:
                recomputed.append(Rematerialized(tokens[index], dispatched.recomputations, outputs))
        # Waits come last, so that no combination delays the experts of the next chunk.
        combined = [chunk() for chunk in returning]
        for part, chunk in zip(recomputed, combined, strict=recompute):
            part.start_before_backward_of(chunk)
        if self.num_chunks == 1:
            return combined[0], dropped[0]
        return torch.cat(combined), torch.stack(dropped).sum()


@dataclass(frozen=True)
class LocalExperts:
    """Range of the experts of a layer that are in this process.

    Args:
        first: index of the first local expert.
        count: L, number of local experts.
        total: E, number of experts of the layer.
        num_selectable: number of experts that the router selects from. Slots with an id from `total` on have no row.
    """

    first: int
    count: int
    total: int
    num_selectable: int

    @classmethod
    def all_of(cls, config: MoEConfig) -> "LocalExperts":
        """Return the range of all experts of a layer with this config."""
        return cls(0, config.num_experts, config.num_experts, config.num_selectable_experts)

    def max_rows(self, num_slots: int, factor: float | None) -> int | None:
        """Compute the largest number of rows that the local experts accept.

        Args:
            num_slots: number of slots in all processes.
            factor: multiple of the number of rows per process if all selectable experts get equally many; None for no
                bound.

        Returns:
            Number of rows; None for no bound.
        """
        return None if factor is None else int(num_slots * self.count // self.num_selectable * factor)

    @property
    def are_all(self) -> bool:
        """Whether all experts of the layer are local."""
        return self.count == self.total

    @property
    def are_selectable(self) -> bool:
        """Whether every routed slot has a row in some process."""
        return self.total == self.num_selectable


class LocalCounts:
    """Base of dispatchers to experts in the same process, whose counts are the number of sequences."""

    def exchange_counts(self, chunks: Sequence[TopK], num_sequences: int) -> list[int]:
        """Return the number of sequences for each chunk; nothing is communicated."""
        return [num_sequences] * len(chunks)


@dataclass(frozen=True, kw_only=True)
class LocallyDispatched(Dispatched):
    """Input of local experts, and the plan by which its rows were sorted; None if `expert_ffn` sorts them."""

    sorting: RaggedPlan | None = None


@dataclass(frozen=True)
class LocalDispatcher(LocalCounts):
    """Dispatches tokens to experts in the same process. With a part of the experts, it returns partial sums.

    1. A counting sort orders the slots by expert.
    2. If the routing weights multiply the outputs, `expert_ffn` gathers rows ``(N, D)`` of x, scales and sums them. If
       they multiply the input, rows are gathered and scaled in `dispatch` and summed in `combine`.

    Args:
        experts: experts of this process.
        scales_input: whether the routing weights multiply the input of the experts.
        buffer_factor: bounds the number of rows by this multiple of the mean over processes; None for no bound.
    """

    experts: LocalExperts
    scales_input: bool = False
    buffer_factor: float | None = None

    def dispatch(self, x: Tensor, top_k: TopK, num_sequences: int) -> Future[LocallyDispatched]:
        """Sort the slots of x ``(T, D)`` by expert; return a function that returns the input of the experts."""
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
        """Sum the outputs ``(N, D)`` over the experts of each token, unless `expert_ffn` has summed them."""
        combined = outputs if dispatched.sorting is None else ragged_unsort(outputs, dispatched.sorting)
        return lambda: combined

    def _plan(self, top_k: TopK) -> RaggedPlan:
        num_slots = top_k.experts.numel()
        max_rows = self.experts.max_rows(num_slots, self.buffer_factor)
        num_rows = None
        if self.experts.are_all:
            # The number of slots is a bound that drops nothing. It tells operators the largest number of rows.
            max_rows = num_slots if max_rows is None else min(num_slots, max_rows)
            num_rows = max_rows if top_k.is_unpadded and self.experts.are_selectable else None
        return ragged_plan(
            top_k.experts,
            self.experts.num_selectable,
            first_expert=self.experts.first,
            num_local_experts=self.experts.count,
            max_rows=max_rows,
            num_rows=num_rows,
        )
