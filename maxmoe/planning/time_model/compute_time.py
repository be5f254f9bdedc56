"""Products of a rank in a step, with their rows, and the time of products and of memory traffic."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from maxmoe.declaration import declaration_of
from maxmoe.parallel.plan.plan import ModulePlan, Plan
from maxmoe.planning.many_meshes import as_tensor
from maxmoe.planning.saved_tensors import local_tokens, local_trace, planned_dispatches
from maxmoe.planning.time_model.device import Device
from maxmoe.planning.traced_forward import traced_modules

# A saved tensor is written and read in the forward, read in the backward, and its gradient is written and read.
PASSES_OVER_ACTIVATIONS = 5
# Its recomputation writes and reads it again.
PASSES_OF_RECOMPUTATION = 2


class Product(NamedTuple):
    """Matrix products of a parameter, of attention scores, or of a traced module.

    Attributes:
        flops: floating-point operations in a forward.
        rows: rows of each product; those of each expert and chunk for routed experts.
        passes: number of times that a step computes as many: the forward, its repetition if it is recomputed, and the
            gradients of the input and of the parameter.
        is_routed: whether it is a product of routed experts.
        channels: channels of a head, for products of attention scores.
    """

    flops: int
    rows: int
    passes: int
    is_routed: bool
    channels: int | None = None


def products(plan: Plan, batch_size: int, sequence_length: int, num_chunks: int) -> Iterator[Product]:
    """List the products of a rank for a batch, if routing is balanced.

    For traced modules, torch counts the products of their forward; see `trace`. In others, every parameter
    multiplies all tokens, and attention is causal: half of the scores count. Every parameter whose first dim is
    `q_heads` makes queries.

    Args:
        plan: plan of a model, or of a part of it.
        batch_size: number of sequences over all ranks.
        sequence_length: number of tokens of each sequence over all ranks.
        num_chunks: number of chunks of the tokens of a MoE layer.
    """
    num_tokens = math.prod(local_tokens(plan, batch_size, sequence_length))
    routed = dict(_routed_slots(plan, batch_size, sequence_length, num_chunks))
    traced = local_trace(plan, batch_size, sequence_length)
    are_traced = traced_modules(plan.model) if traced.problem is None else ()

    def passes_of(path: str) -> int:
        weights = [weight.requires_grad for weight in plan[path].module.parameters(recurse=False)]
        return 2 + (plan.recomputed_by(path) is not None) + (any(weights) or not weights)

    for passes, count in traced.flops(plan, passes_of).items():
        yield Product(count, num_tokens, passes, False)
    for path, module in plan.items():
        repeats = 0 if plan.recomputed_by(path) is None else 1
        for name, parameter in module.parameters.items():
            shape = parameter.used.shard_shape(parameter.parameter.shape)
            if parameter.name.rpartition(".")[0] in are_traced:
                continue
            if len(shape) < 2 or isinstance(_owner(module, name), nn.Embedding):
                continue
            passes = 2 + repeats + parameter.is_trained
            if module.module in routed:
                slots, num_experts, chunks = routed[module.module]
                flops = 2 * slots * math.prod(shape) // num_experts
                again = 0 if repeats or name.startswith("down") else _recomputes_experts(module.module)
                yield Product(flops, slots // (num_experts * chunks), passes + again, True)
                continue
            yield Product(2 * num_tokens * math.prod(shape), num_tokens, passes, False)
            if (parameter.parameter.names or ())[:1] == ("q_heads",):
                channels = parameter.parameter.shape[0] // declaration_of(module.module).tensor_parallel_dims["q_heads"]
                flops = 2 * num_tokens * sequence_length * shape[0]
                yield Product(flops, num_tokens, 3 + repeats, False, channels)


def _owner(module: ModulePlan, name: str) -> nn.Module:
    """Return the module that holds a parameter of a FSDP unit."""
    return module.module.get_submodule(name.rpartition(".")[0])


def _recomputes_experts(module: nn.Module) -> bool:
    """Return whether routed experts recompute their products with gate and up."""
    return "experts" in getattr(module, "recompute", ())


def _routed_slots(
    plan: Plan, batch_size: int, sequence_length: int, num_chunks: int
) -> Iterator[tuple[nn.Module, tuple[int, int, int]]]:
    """Yield by module of routed experts the slots of their ranks, the number of selectable experts, and of chunks."""
    for path, tokens in planned_dispatches(plan, batch_size, sequence_length, num_chunks):
        layer, dispatch = plan.layers[path]
        slots = tokens.num_slots * dispatch.mesh.size(*dispatch.token_axes)
        yield layer.routed_experts, (slots, layer.config.num_selectable_experts, tokens.num_chunks)


class ComputeCost(NamedTuple):
    """Computation of a rank; each tensor is ``(N,)``, one value for each mesh.

    Attributes:
        seconds: time of all products.
        routed_seconds: time of the products of routed experts.
        flops: floating-point operations of all products.
    """

    seconds: Tensor
    routed_seconds: Tensor
    flops: Tensor


def computed(
    plan: Plan, batch_size: int, sequence_length: int, num_chunks: int, device: Device, dtype: torch.dtype, count: int
) -> ComputeCost:
    """Add up the time of the products of a plan in `count` meshes: each runs at a share of the peak; see `Device`."""
    peak = device.peak(dtype)
    total, routed, flops = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
    for product in products(plan, batch_size, sequence_length, num_chunks):
        operations = as_tensor(product.flops, count) * product.passes
        if product.channels is None:
            rows = as_tensor(product.rows, count).clamp(min=1)
            seconds = operations / (peak * device.max_share) * (1 + device.half_rows / rows)
        else:
            share = device.attention_share / (1 + device.half_channels / product.channels)
            seconds = operations / (peak * share)
        total, flops = total + seconds, flops + operations
        if product.is_routed:
            routed = routed + seconds
    return ComputeCost(total, routed, flops)
