"""The collectives of Mixture-of-Experts layers: tokens travel to experts, and partial outputs are summed."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from maxmoe.dispatch import PartialSums
from maxmoe.parallel.dispatch_plan import DispatchPlan
from maxmoe.parallel.plan import Plan
from maxmoe.planning.communication import Communication, Redistribution, RowCommunication
from maxmoe.planning.saved_tensors import local_tokens, weights_dtype
from maxmoe.sharding.redistribute import summed

TRANSPOSED = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather", "all-to-all": "all-to-all"}


def dispatch_communication(
    plan: Plan, batch_size: int, sequence_length: int, num_chunks: int = 1
) -> Iterator[tuple[str, Communication]]:
    """List the communication of Mixture-of-Experts layers, if every expert of a layer gets as many tokens.

    Args:
        plan: of the model.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.
        num_chunks: see `maxmoe.parallelize`.

    Yields:
        The path of the layer, and the communication.

    Raises:
        ValueError: if the axes that shard the tokens do not divide them.
    """
    num_tokens = math.prod(local_tokens(plan, batch_size, sequence_length))
    for path, dispatch_plan in plan.dispatch_plans.items():
        layer = plan.layer(path)
        is_recomputed, dtype = plan.recomputed_by(path) is not None, weights_dtype(layer)
        chunks = dispatch_plan.num_chunks(num_chunks)
        for index in range(chunks):
            # The first chunks have one token more, as in `torch.tensor_split`.
            of_chunk = num_tokens // chunks + (index < num_tokens % chunks)
            for rows in _rows(dispatch_plan, of_chunk, dtype):
                is_repeated = not rows.is_kept if is_recomputed else rows.is_input and "dispatch" in layer.recompute
                for communication in rows.in_a_step(dispatch_plan, is_repeated):
                    yield path, communication
        for summed_parts in _partial_sums(dispatch_plan, num_tokens, dtype, is_recomputed):
            yield path, summed_parts


class _Rows(NamedTuple):
    """A collective of rows in the forward.

    Args:
        name: of the tensor.
        kind: of the collective.
        shape: see `RowCommunication`.
        dtype: see `RowCommunication`.
        has_gradient: whether the backward has the transposed collective.
        is_kept: whether activation checkpointing keeps its result.
        is_input: whether its result is the input of the experts.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    has_gradient: bool = True
    is_kept: bool = False
    is_input: bool = False

    def in_a_step(self, plan: DispatchPlan, is_repeated: bool) -> Iterator[RowCommunication]:
        """List it in the forward, once more if the backward repeats it, and its transpose in the backward."""
        forward, backward = f"{self.name}, forward", f"{self.name}, backward"
        times = [(forward, self.kind)]
        times += [(backward, self.kind)] if is_repeated else []
        times += [(backward, TRANSPOSED[self.kind])] if self.has_gradient else []
        for purpose, kind in times:
            axes = plan.token_axes or plan.expert_axes
            yield RowCommunication(purpose, kind, plan.mesh, axes, self.shape, self.dtype)


def _rows(plan: DispatchPlan, num_tokens: int, weights: torch.dtype) -> Iterator[_Rows]:
    """List the collectives of a dispatcher for some tokens of this rank."""
    if plan.gathers_rows:
        rows = (num_tokens * plan.config.top_k, plan.config.hidden_size)
        counts = (plan.mesh.size(*plan.expert_axes), plan.config.num_experts + 1)
        yield _Rows("counts", "all-gather", counts, torch.int64, has_gradient=False, is_kept=True)
        yield _Rows("outputs of experts", "all-gather", rows, has_gradient=False)
    if not plan.token_axes:
        return
    config, num_ranks = plan.config, plan.mesh.size(*plan.token_axes)
    is_ragged = plan.strategy == "ragged_all_to_all"
    num_counts = config.num_experts // plan.mesh.size(*plan.replicated_axes) + 1 if is_ragged else 2
    counts = (num_ranks, num_counts)
    yield _Rows("counts", "all-gather", counts, torch.int64, has_gradient=False, is_kept=True)
    if is_ragged:
        num_rows = num_tokens * config.top_k // plan.mesh.size(*plan.replicated_axes)
        yield _Rows("tokens to experts", "all-to-all", (num_rows, config.hidden_size), is_input=True)
        yield _Rows("routing weights", "all-to-all", (num_rows,), weights)
        yield _Rows("outputs of experts", "all-to-all", (num_rows, config.hidden_size))
    else:
        gathered = num_ranks * num_tokens
        yield _Rows("tokens to experts", "all-gather", (gathered, config.hidden_size), is_input=True)
        yield _Rows("routing weights", "all-gather", (gathered, config.top_k), weights)
        yield _Rows("expert ids", "all-gather", (gathered, config.top_k), torch.int32, has_gradient=False)
        yield _Rows("outputs of experts", "reduce-scatter", (gathered, config.hidden_size))


def _partial_sums(
    plan: DispatchPlan, num_tokens: int, weights: torch.dtype, is_recomputed: bool
) -> Iterator[Redistribution]:
    """List the communication at the boundary of a layer that several ranks compute parts of."""
    region, config = plan.region(), plan.config
    if not isinstance(region, PartialSums):
        return
    tokens, whole = (num_tokens, config.hidden_size), region.whole()
    forward = [
        Redistribution("partial outputs, forward", region.whole(region.sum_axes), region.outside, tokens),
        Redistribution("dropped slots, forward", *summed(plan.mesh, 0, region.dropped_axes), (), dtype=torch.int64),
    ]
    yield from forward
    if is_recomputed:
        yield from (item._replace(purpose=item.purpose.replace("forward", "backward")) for item in forward)
    # Shared experts that are not summed with the routed ones leave by themselves.
    for _ in range(2 if config.num_shared_experts and not plan.shared_is_partial else 1):
        yield Redistribution("partial outputs, backward", region.outside, whole, tokens)
    grad_input = region.whole(region.embed_axes)
    yield Redistribution("partial outputs, backward", region.whole(region.axes), grad_input, tokens)
    slots = (num_tokens, config.top_k)
    yield Redistribution("routing weights, backward", *summed(plan.mesh, 2, region.axes), slots, dtype=weights)
