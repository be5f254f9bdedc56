"""Dispatch to batched products of static shapes, one block of rows per expert: `MoEConfig.implementation` "dense"."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.nn.dispatcher import Dispatched, Dispatcher, LocalDispatcher, LocalExperts, Pending
from maxmoe.nn.freed_storage import Recomputation
from maxmoe.nn.router import Assignment
from maxmoe.ops import RaggedPlan, ragged_gather, ragged_gather_reduce


def local_dispatcher(config: MoEConfig, experts: LocalExperts | None = None) -> Dispatcher:
    """Choose the dispatcher to the experts in this process.

    Args:
        config: of the layer.
        experts: that are here; None for all.

    Returns:
        The dispatcher.
    """
    experts = LocalExperts.all_of(config) if experts is None else experts
    if config.implementation == "sparse":
        return LocalDispatcher(config, experts)
    return DenseDispatcher(config, experts) if config.capacity_factor is None else CapacityDispatcher(config, experts)


class DenseState(NamedTuple):
    """Of `DenseDispatcher`: the weight ``(T, L)`` of every expert's output, and whether it counts ``(L, T, 1)``."""

    weights: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class DenseDispatcher:
    """Every token to every expert."""

    config: MoEConfig
    experts: LocalExperts

    def dispatch(self, x: Tensor, assignment: Assignment, num_sequences: int) -> Pending[Dispatched]:
        """See `Dispatcher`."""
        num_experts = self.experts.count
        zeros = assignment.weights.new_zeros(x.shape[0], num_experts)
        experts, is_local = _local_ids(assignment.experts, self.experts)
        # Slots of no local expert add zero to some expert.
        weights = zeros.scatter_add(1, experts, assignment.weights.masked_fill(~is_local, 0.0))
        chosen = zeros.scatter_add(1, experts, is_local.to(zeros.dtype)).t().unsqueeze(2) > 0
        scales_input = self.config.apply_weights_to == "input"

        def rows_of_experts(x: Tensor) -> Tensor:
            inputs = x.expand(num_experts, *x.shape)
            if scales_input:
                inputs = (inputs * weights.t().unsqueeze(2)).to(x.dtype)
            # A weight of zero does not remove an output that is not finite: neither forward nor backward may see one.
            return torch.where(chosen, inputs, 0.0).flatten(0, 1)

        rows, dropped = rows_of_experts(x), assignment.experts.new_zeros(())
        state = DenseState(chosen.squeeze(2).t().to(weights.dtype) if scales_input else weights, chosen)
        again = Recomputation(rows, lambda x: lambda: rows_of_experts(x()))
        return lambda: Dispatched(rows, None, _equal_groups(rows, num_experts), dropped, state, (again,))

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """See `Dispatcher`."""
        state: DenseState = dispatched.state
        outputs = torch.where(state.chosen, outputs.view(*state.chosen.shape[:2], outputs.shape[1]), 0.0)
        combined = torch.einsum("etd,te->td", outputs.to(state.weights.dtype), state.weights).to(outputs.dtype)
        return lambda: combined


class CapacityState(NamedTuple):
    """Of `CapacityDispatcher`: the row ``(T * K,)`` of each slot, -1 for none, and the weights ``(T * K,)``."""

    row_of_slot: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class CapacityDispatcher:
    """Every expert takes the first slots of each sequence, up to its capacity; the others are dropped."""

    config: MoEConfig
    experts: LocalExperts

    def dispatch(self, x: Tensor, assignment: Assignment, num_sequences: int) -> Pending[Dispatched]:
        """See `Dispatcher`."""
        config, num_experts = self.config, self.experts.count
        slots_per_sequence = assignment.experts.numel() // max(num_sequences, 1)
        slots = assignment.experts.view(num_sequences, slots_per_sequence)
        assigned, is_local = _local_ids(slots, self.experts)
        one_hot = torch.nn.functional.one_hot(assigned, num_experts) * is_local.unsqueeze(2)
        place = one_hot.cumsum(1).gather(2, assigned.unsqueeze(2)).squeeze(2) - 1
        capacity = min(self._capacity(slots_per_sequence), slots_per_sequence)
        # The buffer has the capacity of a sequence without padding; sequences with padding use less of it.
        limit = capacity if assignment.is_complete else self._capacities((slots >= 0).sum(1, keepdim=True), capacity)
        sequence = torch.arange(num_sequences, device=x.device).unsqueeze(1)
        row = ((assigned * num_sequences + sequence) * capacity + place).view(-1)
        is_placed = (is_local & (place < limit)).view(-1)

        # All dropped slots are scattered to one row past the buffer, which is sliced off.
        num_rows = num_experts * num_sequences * capacity
        slot_of_row = row.new_full((num_rows + 1,), -1)
        slots = torch.arange(row.shape[0], device=x.device)
        slot_of_row = slot_of_row.scatter(0, torch.where(is_placed, row, num_rows), slots)[:num_rows]
        token_of_row = torch.where(slot_of_row >= 0, slot_of_row // config.top_k, -1)

        weights = assignment.weights.reshape(-1)
        scales_input = config.apply_weights_to == "input"
        input_weights = ragged_gather(weights.unsqueeze(1), slot_of_row).squeeze(1) if scales_input else None
        rows = ragged_gather(x, token_of_row, input_weights)
        again = Recomputation(rows, lambda x: lambda: ragged_gather(x(), token_of_row, input_weights))
        state = CapacityState(torch.where(is_placed, row, -1), None if scales_input else weights)
        dropped = (is_local.view(-1) & ~is_placed).sum()
        return lambda: Dispatched(rows, None, _equal_groups(rows, num_experts), dropped, state, (again,))

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """See `Dispatcher`."""
        state: CapacityState = dispatched.state
        combined = ragged_gather_reduce(outputs, state.row_of_slot, self.config.top_k, state.weights)
        return lambda: combined

    def _capacity(self, num_slots: int) -> int:
        """Slots that an expert takes of a sequence of `num_slots`."""
        factor = self.config.capacity_factor
        assert factor is not None
        return int(max(math.ceil(num_slots / self.config.num_experts) * factor, factor))

    def _capacities(self, num_slots: Tensor, largest: int) -> Tensor:
        """The same for a tensor, in the same float64 arithmetic, and at most `largest`."""
        factor = self.config.capacity_factor
        assert factor is not None
        capacities = ((num_slots.double() / self.config.num_experts).ceil() * factor).clamp_min(factor)
        return capacities.long().clamp_max(largest)


def _local_ids(ids: Tensor, experts: LocalExperts) -> tuple[Tensor, Tensor]:
    """Return the ids counted from the first local expert, and whether they are of one; any of them for the others."""
    local = ids - experts.first
    is_local = (ids >= experts.first) & (local < experts.count)
    return local.masked_fill(~is_local, 0), is_local


def _equal_groups(rows: Tensor, num_groups: int) -> RaggedPlan:
    """Return the plan of rows in the order of their experts, as many for each."""
    group_sizes = torch.full((num_groups,), rows.shape[0] // num_groups, device=rows.device)
    return RaggedPlan.of_sorted_rows(rows.shape[0], group_sizes)
