"""How the routed experts are computed: one small object per way, chosen by `MoEConfig.implementation`."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.nn.activation import activate
from maxmoe.nn.experts import Experts
from maxmoe.nn.router import Routing
from maxmoe.ops import (
    RaggedPlan,
    ragged_gather,
    ragged_gather_reduce,
    ragged_plan,
    ragged_sort,
    ragged_unsort,
)


class Computed(NamedTuple):
    """Sum of each token's experts ``(T, D)``, and the number of slots that were dropped, ``()``, int64."""

    hidden_states: Tensor
    dropped: Tensor


class Compute(Protocol):
    """A way to compute the routed experts."""

    def __call__(self, x: Tensor, routing: Routing, experts: Experts, num_sequences: int) -> Computed:
        """Compute the routed experts.

        Args:
            x: ``(T, D)``, floating; sequences of equal length, one after the other.
            routing: of x.
            experts: the parameters.
            num_sequences: B.

        Returns:
            What came of it.
        """
        ...


@dataclass(frozen=True)
class SparseCompute:
    """The routed rows and nothing else, through `maxmoe.ops.expert_ffn`."""

    config: MoEConfig

    def __call__(self, x: Tensor, routing: Routing, experts: Experts, num_sequences: int) -> Computed:
        """See `Compute`."""
        num_slots = routing.experts.numel()
        max_rows = self._max_rows(num_slots)
        num_rows = num_slots if max_rows is None else min(num_slots, max_rows)  # the router leaves no slot out
        plan = ragged_plan(routing.experts, self.config.num_experts, max_rows=max_rows, num_rows=num_rows)
        if self.config.apply_weights_to == "output":
            return Computed(experts(x, routing.weights, plan), plan.dropped)
        rows = ragged_sort(x, plan, routing.weights)
        return Computed(ragged_unsort(experts(rows, None, _in_order(plan)), plan), plan.dropped)

    def _max_rows(self, num_slots: int) -> int | None:
        factor = self.config.buffer_factor
        return None if factor is None else int(num_slots * factor)


def _in_order(plan: RaggedPlan) -> RaggedPlan:
    """The plan of rows that are sorted already."""
    order = torch.arange(plan.slots.shape[0], device=plan.slots.device)
    return plan._replace(slots=order, rows=order, top_k=1)


@dataclass(frozen=True)
class DenseCompute:
    """Batched products of static shapes: every expert on every token, or with a capacity on its share of slots."""

    config: MoEConfig

    def __call__(self, x: Tensor, routing: Routing, experts: Experts, num_sequences: int) -> Computed:
        """See `Compute`."""
        if self.config.capacity_factor is None:
            return self._every_expert(x, routing, experts)
        return self._within_capacity(x, routing, experts, num_sequences)

    def _every_expert(self, x: Tensor, routing: Routing, experts: Experts) -> Computed:
        num_experts = self.config.num_experts
        zeros = routing.weights.new_zeros(x.shape[0], num_experts)
        weights = zeros.scatter(1, routing.experts, routing.weights)
        chosen = zeros.scatter(1, routing.experts, 1.0).t().unsqueeze(2) > 0
        inputs = x.expand(num_experts, *x.shape)
        if self.config.apply_weights_to == "input":
            inputs = (inputs * weights.t().unsqueeze(2)).to(x.dtype)
            weights = chosen.squeeze(2).t().to(weights.dtype)
        # A zero weight does not silence an expert whose output is not finite; neither forward nor backward may see it.
        outputs = torch.where(chosen, self._ffn(torch.where(chosen, inputs, 0.0), experts), 0.0)
        hidden_states = torch.einsum("etd,te->td", outputs.to(weights.dtype), weights)
        return Computed(hidden_states.to(outputs.dtype), routing.experts.new_zeros(()))

    def _within_capacity(self, x: Tensor, routing: Routing, experts: Experts, num_sequences: int) -> Computed:
        config = self.config
        slots_per_sequence = routing.experts.numel() // max(num_sequences, 1)
        capacity = self._capacity(slots_per_sequence)
        assigned = routing.experts.view(num_sequences, slots_per_sequence)
        one_hot = torch.nn.functional.one_hot(assigned, config.num_experts)
        place = one_hot.cumsum(1).gather(2, assigned.unsqueeze(2)).squeeze(2) - 1
        sequence = torch.arange(num_sequences, device=x.device).unsqueeze(1)
        row = ((assigned * num_sequences + sequence) * capacity + place).view(-1)
        is_kept = (place < capacity).view(-1)

        # One place more than the buffer has takes what is dropped.
        num_rows = config.num_experts * num_sequences * capacity
        slot_of_row = row.new_full((num_rows + 1,), -1)
        slots = torch.arange(row.shape[0], device=x.device)
        slot_of_row = slot_of_row.scatter(0, torch.where(is_kept, row, num_rows), slots)[:num_rows]
        token_of_row = torch.where(slot_of_row >= 0, slot_of_row // config.top_k, -1)

        weights = routing.weights.reshape(-1)
        scales_input = config.apply_weights_to == "input"
        input_weights = ragged_gather(weights.unsqueeze(1), slot_of_row).squeeze(1) if scales_input else None
        inputs = ragged_gather(x, token_of_row, input_weights)
        outputs = self._ffn(inputs.view(config.num_experts, num_sequences * capacity, x.shape[1]), experts)
        row_of_slot = torch.where(is_kept, row, -1)
        hidden_states = ragged_gather_reduce(
            outputs.flatten(0, 1), row_of_slot, config.top_k, None if scales_input else weights
        )
        return Computed(hidden_states, (~is_kept).sum())

    def _capacity(self, slots_per_sequence: int) -> int:
        factor = self.config.capacity_factor
        assert factor is not None
        return int(max(math.ceil(slots_per_sequence / self.config.num_experts) * factor, factor))

    def _ffn(self, inputs: Tensor, experts: Experts) -> Tensor:
        """Inputs [E, N, D], each block through its expert."""

        def project(x: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
            product = x @ matrices
            return product if bias is None else product + bias.unsqueeze(1).to(product.dtype)

        gate = None
        if experts.gate_proj is not None:
            gate = project(inputs, experts.gate_proj, experts.gate_bias)
        up = project(inputs, experts.up_proj, experts.up_bias)
        activated = activate(gate, up, self.config.activation, self.config.activation_limit)
        return project(activated, experts.down_proj, experts.down_bias)


def compute_for(config: MoEConfig) -> Compute:
    """Choose the way to compute that a config asks for.

    Args:
        config: of the layer.

    Returns:
        The way.
    """
    ways: dict[str, type[SparseCompute] | type[DenseCompute]] = {
        "sparse": SparseCompute,
        "dense": DenseCompute,
    }
    return ways[config.implementation](config)
