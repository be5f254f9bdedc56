"""Dispatch of tokens to experts in the same process, and combination of the outputs of each token's experts.

With ``implementation="dense"``, batched products of static shapes compute one block of rows per expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxmoe._torch import is_traced
from maxmoe.config import MoEConfig
from maxmoe.nn.dispatcher import Dispatched, Dispatcher, Future
from maxmoe.nn.routing import TopK
from maxmoe.nn.windows import Agreement, Buffer, Window, Windows, plan_within
from maxmoe.ops import RaggedPlan, ragged_gather, ragged_gather_reduce, ragged_plan, ragged_sort, ragged_unsort
from maxmoe.recompute.freed_storage import Recomputation


@dataclass(frozen=True)
class LocalExperts:
    """Range of the experts of a layer that are in this process.

    Args:
        first: index of the first local expert.
        count: L, number of local experts.
        total: E, number of experts of the layer.
        num_selectable: number of experts that the router selects from. Slots with an id >= `total` have no row.
    """

    first: int
    count: int
    total: int
    num_selectable: int

    @classmethod
    def all_of(cls, config: MoEConfig) -> "LocalExperts":
        """Return the range of all experts of a layer with this config."""
        return cls(0, config.num_experts, config.num_experts, config.num_selectable_experts)

    def mean_rows(self, num_slots: int) -> int:
        """Return the number of rows of the slots in all processes if all selectable experts get equally many."""
        return num_slots * self.count // self.num_selectable

    @property
    def are_all(self) -> bool:
        """Whether all experts of the layer are local."""
        return self.count == self.total

    @property
    def are_selectable(self) -> bool:
        """Whether every routed slot has a row in some process."""
        return self.total == self.num_selectable

    def fit(self, factor: float) -> bool:
        """Whether all rows fit in a buffer with this factor, whatever the routing is."""
        return self.are_all and factor * self.count >= self.num_selectable


class LocalCounts(NamedTuple):
    """Counts of a chunk for dispatchers to experts in the same process.

    Attributes:
        num_sequences: B, number of sequences.
        window: rows that are computed; None for all rows.
    """

    num_sequences: int
    window: Window | None = None


def local_dispatcher(
    config: MoEConfig, experts: LocalExperts | None = None, agreement: Agreement | None = None
) -> Dispatcher[Any, LocalCounts]:
    """Return the dispatcher of a layer to the experts of this process, by default all of them.

    `agreement` is for processes with other tokens that compute the same experts, see `Buffer`.
    """
    experts = LocalExperts.all_of(config) if experts is None else experts
    scales_input = config.apply_weights_to == "input"
    if config.implementation == "sparse":
        buffer = Buffer.of(config, agreement)
        if buffer is not None and not buffer.drops and experts.fit(buffer.factor):
            buffer = None
        return LocalDispatcher(experts, scales_input, buffer)
    if config.capacity_factor is None:
        return DenseDispatcher(experts, scales_input)
    return CapacityDispatcher(experts, scales_input, factor=config.capacity_factor)


@dataclass(frozen=True, kw_only=True)
class LocallyDispatched(Dispatched):
    """Input of local experts, and the function that sums their outputs ``(N, D)``; None if `expert_ffn` sums them."""

    sum_outputs: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class InProcess:
    """Base of dispatchers to experts in the same process, whose counts are `LocalCounts`."""

    experts: LocalExperts
    scales_input: bool = False

    def exchange_counts(
        self, chunks: Sequence[TopK], num_sequences: int, dtype: torch.dtype
    ) -> Sequence[LocalCounts | Windows[LocalCounts]]:
        """Return the number of sequences for each chunk; nothing is communicated."""
        return [LocalCounts(num_sequences)] * len(chunks)

    def combine(self, outputs: Tensor, dispatched: LocallyDispatched) -> Future[Tensor]:
        """Sum the outputs ``(N, D)`` over the experts of each token, unless `expert_ffn` has summed them."""
        combined = outputs if dispatched.sum_outputs is None else dispatched.sum_outputs(outputs)
        return lambda: combined


def _gathered(
    x: Tensor,
    gather: Callable[[Tensor], Tensor],
    group_sizes: Tensor,
    dropped: Tensor,
    sum_outputs: Callable[[Tensor], Tensor],
) -> Future[LocallyDispatched]:
    """Gather the rows of x, sorted by expert. `group_sizes` has the number of rows of each expert."""
    rows = gather(x)
    dispatched = LocallyDispatched(
        x=rows,
        weights=None,
        plan=RaggedPlan.of_sorted_rows(rows.shape[0], group_sizes),
        dropped=dropped,
        recomputations=(Recomputation(rows, lambda x: lambda: gather(x())),),
        sum_outputs=sum_outputs,
    )
    return lambda: dispatched


@dataclass(frozen=True)
class LocalDispatcher(InProcess):
    """Dispatches tokens to experts in the same process. With a part of the experts, it returns partial sums.

    1. A counting sort orders the slots by expert.
    2. If the routing weights multiply the outputs, `expert_ffn` gathers rows ``(N, D)`` of x, scales and sums them. If
       they multiply the input, rows are gathered and scaled in `dispatch` and summed in `combine`.

    Args:
        experts: experts of this process.
        scales_input: whether the routing weights multiply the input of the experts.
        buffer: bound on the number of rows; None for no bound.
    """

    buffer: Buffer | None = None

    def exchange_counts(
        self, chunks: Sequence[TopK], num_sequences: int, dtype: torch.dtype
    ) -> Sequence[LocalCounts | Windows[LocalCounts]]:
        """Return the number of sequences for each chunk, and the windows of its rows if they overflow the buffer."""
        counts, buffer = [LocalCounts(num_sequences)] * len(chunks), self.buffer
        if buffer is None or buffer.drops:
            return counts
        means = [self.experts.mean_rows(chunk.experts.numel()) for chunk in chunks]
        rows = [self._num_rows(chunk) for chunk in chunks]
        return buffer.in_windows(counts, rows, means, chunks[0].experts.device)

    def dispatch(self, x: Tensor, top_k: TopK, counts: LocalCounts) -> Future[LocallyDispatched]:
        """Sort the slots of x ``(T, D)`` by expert; return a function that returns the input of the experts."""
        plan = self._plan(top_k)
        if counts.window is not None:
            plan = plan_within(plan, counts.window)
        if not self.scales_input:
            dispatched = LocallyDispatched(x=x, weights=top_k.weights, plan=plan, dropped=plan.dropped)
            return lambda: dispatched
        return _gathered(
            x,
            lambda x: ragged_sort(x, plan, top_k.weights),
            plan.group_sizes,
            plan.dropped,
            lambda outputs: ragged_unsort(outputs, plan),
        )

    def _num_rows(self, top_k: TopK) -> int:
        """Return the number of rows; in traced code, where it is not known, a bound."""
        is_known = self.experts.are_all and self.experts.are_selectable and top_k.is_unpadded
        if is_known or is_traced():
            return top_k.experts.numel()
        return int(_local_ids(top_k.experts, self.experts)[1].sum())

    def _plan(self, top_k: TopK) -> RaggedPlan:
        num_slots, buffer = top_k.experts.numel(), self.buffer
        max_rows = num_rows = None
        if buffer is not None and buffer.drops:
            max_rows = buffer.size(self.experts.mean_rows(num_slots))
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


@dataclass(frozen=True)
class DenseDispatcher(InProcess):
    """Dispatches every token to every local expert: rows ``(L * T, D)``.

    Experts that a token is not routed to have the weight zero.
    """

    def dispatch(self, x: Tensor, top_k: TopK, counts: LocalCounts) -> Future[LocallyDispatched]:
        """Copy x ``(T, D)`` for each local expert."""
        num_experts = self.experts.count
        zeros = top_k.weights.new_zeros(x.shape[0], num_experts)
        experts, is_local = _local_ids(top_k.experts, self.experts)
        # A slot without a local expert has the id 0 here, and the weight 0, so that it adds nothing.
        weights = zeros.scatter_add(1, experts, top_k.weights.masked_fill(~is_local, 0.0))
        chosen = zeros.scatter_add(1, experts, is_local.to(zeros.dtype)).t().unsqueeze(2) > 0

        def rows_of_experts(x: Tensor) -> Tensor:
            inputs = x.expand(num_experts, *x.shape)
            if self.scales_input:
                inputs = (inputs * weights.t().unsqueeze(2)).to(x.dtype)
            # A weight of zero does not remove an output that is not finite. Tokens are zeroed for experts that they are
            # not routed to, so that there is no such output in the forward or the backward.
            return torch.where(chosen, inputs, 0.0).flatten(0, 1)

        output_weights = chosen.squeeze(2).t().to(weights.dtype) if self.scales_input else weights

        def sum_outputs(outputs: Tensor) -> Tensor:
            outputs = torch.where(chosen, outputs.view(*chosen.shape[:2], outputs.shape[1]), 0.0)
            return torch.einsum("etd,te->td", outputs.to(output_weights.dtype), output_weights).to(outputs.dtype)

        group_sizes = torch.full((num_experts,), x.shape[0], device=x.device)
        return _gathered(x, rows_of_experts, group_sizes, top_k.experts.new_zeros(()), sum_outputs)


@dataclass(frozen=True, kw_only=True)
class CapacityDispatcher(InProcess):
    """Dispatches the first slots of each sequence to each expert, up to its capacity; further slots are dropped.

    `factor` is `MoEConfig.capacity_factor`.
    """

    factor: float

    def dispatch(self, x: Tensor, top_k: TopK, counts: LocalCounts) -> Future[LocallyDispatched]:
        """Gather rows ``(L * B * capacity, D)`` of x ``(T, D)``."""
        num_sequences, num_experts, num_choices = counts.num_sequences, self.experts.count, top_k.experts.shape[1]
        slots_per_sequence = top_k.experts.numel() // max(num_sequences, 1)
        slots = top_k.experts.view(num_sequences, slots_per_sequence)
        assigned, is_local = _local_ids(slots, self.experts)
        # one_hot of torch writes in place, which selective checkpointing refuses for an output that it saves.
        one_hot = (assigned.unsqueeze(2) == torch.arange(num_experts, device=x.device)) & is_local.unsqueeze(2)
        place = one_hot.cumsum(1).gather(2, assigned.unsqueeze(2)).squeeze(2) - 1
        capacity = torch.sym_min(self._capacity(slots_per_sequence), slots_per_sequence)  # type: ignore[no-untyped-call]
        # The buffer is allocated for sequences without padding, so that its shape is static. The capacity of a sequence
        # with padding is smaller, and leaves rows of the buffer empty.
        limit = capacity if top_k.is_unpadded else self._capacities((slots >= 0).sum(1, keepdim=True), capacity)
        sequence = torch.arange(num_sequences, device=x.device).unsqueeze(1)
        row = ((assigned * num_sequences + sequence) * capacity + place).view(-1)
        is_placed = (is_local & (place < limit)).view(-1)

        # All dropped slots are scattered to one row past the buffer, which is sliced off.
        num_rows = num_experts * num_sequences * capacity
        slot_of_row = row.new_full((num_rows + 1,), -1)
        slots = torch.arange(row.shape[0], device=x.device)
        slot_of_row = slot_of_row.scatter(0, torch.where(is_placed, row, num_rows), slots)[:num_rows]
        token_of_row = torch.where(slot_of_row >= 0, slot_of_row // num_choices, -1)

        weights = top_k.weights.reshape(-1)
        input_weights = ragged_gather(weights.unsqueeze(1), slot_of_row).squeeze(1) if self.scales_input else None
        row_of_slot = torch.where(is_placed, row, -1)
        output_weights = None if self.scales_input else weights
        return _gathered(
            x,
            lambda x: ragged_gather(x, token_of_row, input_weights),
            torch.full((num_experts,), num_sequences * capacity, device=x.device),
            (is_local.view(-1) & ~is_placed).sum(),
            lambda outputs: ragged_gather_reduce(outputs, row_of_slot, num_choices, output_weights),
        )

    def _capacity(self, num_slots: int) -> int:
        """Return the number of slots that an expert accepts from a sequence with `num_slots` slots."""
        # Functions that torch.export traces for a length that is not fixed.
        per_expert = -(-num_slots // self.experts.num_selectable)
        most = torch.sym_max(per_expert * self.factor, self.factor)  # type: ignore[no-untyped-call]
        capacity: int = torch.sym_int(most)  # type: ignore[no-untyped-call]
        return capacity

    def _capacities(self, num_slots: Tensor, largest: int) -> Tensor:
        """Compute `_capacity` elementwise, in the same float64 arithmetic, and bound it by `largest`."""
        capacities = ((num_slots.double() / self.experts.num_selectable).ceil() * self.factor).clamp_min(self.factor)
        return capacities.long().clamp_max(largest)


def _local_ids(ids: Tensor, experts: LocalExperts) -> tuple[Tensor, Tensor]:
    """Return ids relative to the first local expert, 0 for other experts, and whether the expert is local."""
    local = ids - experts.first
    is_local = (ids >= experts.first) & (local < experts.count)
    return local.masked_fill(~is_local, 0), is_local
