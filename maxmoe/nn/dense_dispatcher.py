"""Dispatch to batched products of static shapes, one block of rows per expert: `MoEConfig.implementation` "dense"."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.nn.dispatcher import Dispatched, Dispatcher, LocalDispatcher
from maxmoe.nn.router import Routing
from maxmoe.ops import RaggedPlan, ragged_gather, ragged_gather_reduce


def local_dispatcher(config: MoEConfig) -> Dispatcher:
    """Choose the dispatcher of a layer that has all experts in this process.

    Args:
        config: of the layer.

    Returns:
        The dispatcher.
    """
    if config.implementation == "sparse":
        return LocalDispatcher(config)
    return DenseDispatcher(config) if config.capacity_factor is None else CapacityDispatcher(config)


class DenseState(NamedTuple):
    """Of `DenseDispatcher`: the weight ``(T, E)`` of every expert's output, and whether it counts ``(E, T, 1)``."""

    weights: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class DenseDispatcher:
    """Every token to every expert."""

    config: MoEConfig

    def dispatch(self, x: Tensor, routing: Routing, num_sequences: int) -> Dispatched:
        """See `Dispatcher`."""
        num_experts = self.config.num_experts
        zeros = routing.weights.new_zeros(x.shape[0], num_experts)
        # Slots that are not routed (-1) add zero to some expert.
        experts, is_routed = routing.experts.clamp_min(0), (routing.experts >= 0).to(zeros.dtype)
        weights = zeros.scatter_add(1, experts, routing.weights)
        chosen = zeros.scatter_add(1, experts, is_routed).t().unsqueeze(2) > 0
        inputs = x.expand(num_experts, *x.shape)
        if self.config.apply_weights_to == "input":
            inputs = (inputs * weights.t().unsqueeze(2)).to(x.dtype)
            weights = chosen.squeeze(2).t().to(weights.dtype)
        # A weight of zero does not remove an output that is not finite: neither forward nor backward may see one.
        rows = torch.where(chosen, inputs, 0.0).flatten(0, 1)
        dropped = routing.experts.new_zeros(())
        return Dispatched(rows, None, _equal_groups(rows, num_experts), dropped, DenseState(weights, chosen))

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher`."""
        state: DenseState = dispatched.state
        outputs = torch.where(state.chosen, outputs.view(*state.chosen.shape[:2], outputs.shape[1]), 0.0)
        return torch.einsum("etd,te->td", outputs.to(state.weights.dtype), state.weights).to(outputs.dtype)


class CapacityState(NamedTuple):
    """Of `CapacityDispatcher`: the row ``(T * K,)`` of each slot, -1 for none, and the weights ``(T * K,)``."""

    row_of_slot: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class CapacityDispatcher:
    """Every expert takes the first slots of each sequence, up to its capacity; the others are dropped."""

    config: MoEConfig

    def dispatch(self, x: Tensor, routing: Routing, num_sequences: int) -> Dispatched:
        """See `Dispatcher`."""
        config = self.config
        slots_per_sequence = routing.experts.numel() // max(num_sequences, 1)
        assigned = routing.experts.view(num_sequences, slots_per_sequence)
        is_routed = assigned >= 0
        assigned = assigned.clamp_min(0)
        one_hot = torch.nn.functional.one_hot(assigned, config.num_experts) * is_routed.unsqueeze(2)
        place = one_hot.cumsum(1).gather(2, assigned.unsqueeze(2)).squeeze(2) - 1
        capacity = min(self._capacity(slots_per_sequence), slots_per_sequence)
        # The buffer has the capacity of a sequence without padding; sequences with padding use less of it.
        limit = capacity if routing.is_complete else self._capacities(is_routed.sum(1, keepdim=True), capacity)
        sequence = torch.arange(num_sequences, device=x.device).unsqueeze(1)
        row = ((assigned * num_sequences + sequence) * capacity + place).view(-1)
        is_placed = (is_routed & (place < limit)).view(-1)

        # All dropped slots are scattered to one row past the buffer, which is sliced off.
        num_rows = config.num_experts * num_sequences * capacity
        slot_of_row = row.new_full((num_rows + 1,), -1)
        slots = torch.arange(row.shape[0], device=x.device)
        slot_of_row = slot_of_row.scatter(0, torch.where(is_placed, row, num_rows), slots)[:num_rows]
        token_of_row = torch.where(slot_of_row >= 0, slot_of_row // config.top_k, -1)

        weights = routing.weights.reshape(-1)
        scales_input = config.apply_weights_to == "input"
        input_weights = ragged_gather(weights.unsqueeze(1), slot_of_row).squeeze(1) if scales_input else None
        rows = ragged_gather(x, token_of_row, input_weights)
        state = CapacityState(torch.where(is_placed, row, -1), None if scales_input else weights)
        return Dispatched(
            rows, None, _equal_groups(rows, config.num_experts), (is_routed.view(-1) & ~is_placed).sum(), state
        )

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """See `Dispatcher`."""
        state: CapacityState = dispatched.state
        return ragged_gather_reduce(outputs, state.row_of_slot, self.config.top_k, state.weights)

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


def _equal_groups(rows: Tensor, num_groups: int) -> RaggedPlan:
    """Return the plan of rows in the order of their experts, as many for each."""
    group_sizes = torch.full((num_groups,), rows.shape[0] // num_groups, device=rows.device)
    return RaggedPlan.of_sorted_rows(rows.shape[0], group_sizes)
