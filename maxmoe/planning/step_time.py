"""Time of collectives and products of a rank on a device; the formulas stand in docs/planning.md."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from maxmoe.declaration import declaration_of
from maxmoe.planning.communication import times_and_bytes
from maxmoe.planning.device import Device
from maxmoe.planning.memory import activation_sizes
from maxmoe.planning.planned_batch import PlannedBatch
from maxmoe.planning.traced_forward import traced_modules
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.planned_collective import PlannedCollective

# A saved tensor is written and read in the forward, read in the backward, and its gradient is written and read.
PASSES_OVER_ACTIVATIONS = 5
# Its recomputation writes and reads it again.
PASSES_OF_RECOMPUTATION = 2
# What a collective brings is written to memory and read by what follows.
PASSES_OVER_SENT = 2


class Cost(NamedTuple):
    """Cost of computation and collectives on a rank, in seconds, floating-point operations and bytes."""

    compute: float = 0.0  # products and memory traffic
    hidden: float = 0.0  # collectives that run beside products
    exposed: float = 0.0  # all other collectives
    bubble: float = 0.0  # waiting for other stages
    flops: float = 0.0
    model_flops: float = 0.0  # without recomputation
    intra_bytes: float = 0.0  # sent to ranks of the same node
    inter_bytes: float = 0.0  # sent to other nodes

    @property
    def seconds(self) -> float:
        """Time that passes."""
        return self.compute + self.exposed + self.bubble

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        """Return the sum of two costs."""
        return Cost(*(mine + its for mine, its in zip(self, other, strict=True)))

    def __mul__(self, times: float) -> "Cost":  # type: ignore[override]
        """Return the cost of running all several times."""
        return Cost(*(each * times for each in self))

    def hide(self, seconds: float) -> "Cost":
        """Return the cost if this part of the exposed communication runs beside products."""
        return self._replace(hidden=self.hidden + seconds, exposed=self.exposed - seconds)


def ranks_along(axes: Sequence[str], mesh: Mesh, device: Device) -> tuple[int, int]:
    """Return the number of ranks along axes, and how many of them are on one node; the last axis is within nodes."""
    ranks = on_node = stride = 1
    for axis, size in reversed(mesh.sizes.items()):
        if axis in axes:
            ranks *= size
            on_node *= min(max(device.ranks_per_node // stride, 1), size) if device.ranks_per_node else size
        stride *= size
    return ranks, on_node


def sent(collectives: Iterable[PlannedCollective], mesh: Mesh, device: Device) -> Cost:
    """Add up the cost of collectives. Those with the same bucket run as one.

    On a ring of n ranks on m nodes, with n / m ranks on each,

        seconds = steps_intra * latency_intra + steps_inter * latency_inter + max(intra, inter) + memory

    with n - m steps within a node and m - 1 between nodes, twice that for an all-reduce, and each rank of a node with a
    network card of its own.
    """
    seconds = intra_bytes = inter_bytes = 0.0
    intra, inter = device.intra_node, device.inter_node
    for (_, kind, axes), (times, num_bytes) in times_and_bytes(collectives).items():
        ranks, on_node = ranks_along(axes, mesh, device)
        nodes = -(-ranks // on_node)
        latency = (ranks - nodes) * intra.latency + (nodes - 1) * inter.latency
        if kind == "send":
            crossing = float(nodes > 1)
            latency = inter.latency if nodes > 1 else intra.latency
        elif kind == "all-to-all":
            crossing = (ranks - on_node) / max(ranks - 1, 1)
        else:  # a ring leaves a node once, by the network cards of all its ranks on the node
            crossing = (nodes > 1) / on_node
        within = num_bytes * (1 - crossing) if kind in ("all-to-all", "send") else num_bytes
        steps = times * (2 if kind == "all-reduce" else 1)  # a reduce-scatter and an all-gather
        seconds += steps * latency + max(within / intra.bandwidth, num_bytes * crossing / inter.bandwidth)
        seconds += PASSES_OVER_SENT * num_bytes / device.memory_bandwidth
        intra_bytes, inter_bytes = intra_bytes + num_bytes * (1 - crossing), inter_bytes + num_bytes * crossing
    return Cost(exposed=seconds * device.slowdown(mesh.num_ranks), intra_bytes=intra_bytes, inter_bytes=inter_bytes)


class Product(NamedTuple):
    """Matrix products of a parameter, of attention scores, or of a traced module."""

    flops: int  # of a forward
    rows: int  # of each product; for routed experts, rows of one expert in one chunk
    passes: int  # products with the same FLOPs in a step: the forward, and gradients of the input and of the parameter
    repeats: int  # how often the backward recomputes the forward
    is_routed: bool = False
    channels: int | None = None  # of a head, for products of attention scores


def products(batch: PlannedBatch) -> Iterator[Product]:
    """List the products of a rank for a batch, if routing is balanced.

    For traced modules, torch counts the products of their forward; see `trace`. In others, every parameter
    multiplies all tokens, and attention is causal: half of the scores count. Every parameter whose first dim is
    `q_heads` makes queries.
    """
    plan, num_tokens = batch.plan, math.prod(batch.local_tokens)
    routed = {plan.layers[path][0].routed_experts: tokens for path, tokens in batch.dispatches()}
    traced = batch.trace()
    are_traced = traced_modules(plan.model) if traced.problem is None else ()
    for path, flops in traced.flops.items():
        if batch.has_module(path):
            weights = [weight.requires_grad for weight in plan[path].module.parameters(recurse=False)]
            repeats = int(plan.recomputed_by(path) is not None)
            yield Product(flops, num_tokens, 2 + (any(weights) or not weights), repeats)
    for path, module in plan.items():
        repeats = int(plan.recomputed_by(path) is not None)
        for name, parameter in module.parameters.items():
            shape = parameter.used.shard_shape(parameter.parameter.shape)
            owner = parameter.name.rpartition(".")[0]
            if len(shape) < 2 or owner in are_traced or isinstance(plan.model.get_submodule(owner), nn.Embedding):
                continue
            passes = 2 + parameter.is_trained
            if module.module in routed:
                tokens = routed[module.module]
                slots, num_experts = tokens.num_joint_slots, tokens.config.num_selectable_experts
                flops, rows = 2 * slots * math.prod(shape) // num_experts, slots // (num_experts * tokens.num_chunks)
                is_repeated = not name.startswith("down") and "experts" in getattr(module.module, "recompute", ())
                yield Product(flops, rows, passes, max(repeats, int(is_repeated)), is_routed=True)
                continue
            yield Product(2 * num_tokens * math.prod(shape), num_tokens, passes, repeats)
            if (parameter.parameter.names or ())[:1] == ("q_heads",):
                channels = parameter.parameter.shape[0] // declaration_of(module.module).tensor_parallel_dims["q_heads"]
                flops = 2 * num_tokens * batch.sequence_length * shape[0]
                yield Product(flops, num_tokens, 3, repeats, channels=channels)


def computed(batch: PlannedBatch, overhead: float, mesh: Mesh, device: Device) -> tuple[Cost, float]:
    """Add up the products, the memory traffic and an overhead in seconds of a part of a model.

    Returns the cost, and the seconds of the products of routed experts in it.
    """
    compute, routed = overhead, 0.0
    flops = model_flops = 0
    for product in products(batch):
        operations = product.flops * (product.passes + product.repeats)
        seconds = operations / device.peak(batch.dtype) / device.share(product.rows, product.channels)
        compute, routed = compute + seconds, routed + seconds * product.is_routed
        flops, model_flops = flops + operations, model_flops + product.flops * product.passes
    for recomputed_by, size in activation_sizes(batch).items():
        passes = PASSES_OVER_ACTIVATIONS + (0 if recomputed_by is None else PASSES_OF_RECOMPUTATION)
        compute += size * passes / device.memory_bandwidth
    for _, tokens in batch.dispatches():
        rows = tokens.num_joint_slots * tokens.layout.num_local_experts // tokens.config.num_selectable_experts
        size = rows * tokens.config.row_size * batch.dtype.itemsize
        compute += size * device.row_passes / device.memory_bandwidth
    slowdown = device.slowdown(mesh.num_ranks)
    return Cost(compute=compute * slowdown, flops=flops, model_flops=model_flops), routed * slowdown
