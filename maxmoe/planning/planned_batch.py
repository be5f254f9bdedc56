"""Forward and backward of a batch by a plan: tokens, saved tensors and dispatches of a rank."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from maxmoe.checks.fields import check_int
from maxmoe.declaration import EXPERT_TOKEN_DIMS, SavedTensor, declaration_of
from maxmoe.parallel.dispatch import PlannedDispatch
from maxmoe.parallel.plan.dispatch_plan import DispatchPlan
from maxmoe.parallel.plan.parameter_sharding import tensor_parallel_activation
from maxmoe.parallel.plan.plan import ModulePlan, Plan
from maxmoe.pipelining.boundary import Boundary
from maxmoe.pipelining.micro_batches import MicroBatch
from maxmoe.planning.traced_forward import Trace, trace, traced_modules


def check_sequence_length(model: nn.Module, length: int) -> None:
    """Raise a ValueError if the forward of a module of a model does not take sequences of this length."""
    check_int("sequence_length", length, at_least=1)
    for module in model.modules():
        longest = declaration_of(module).max_sequence_length
        if longest is not None and length > longest:
            raise ValueError(
                f"sequence_length ({length}) must not exceed max_sequence_length ({longest}) of {type(module).__name__}"
            )


@dataclass(frozen=True)
class PlannedBatch:
    """Forward and backward of a batch by the plan of a model or of a part of it, if routing is balanced."""

    plan: Plan
    batch_size: int  # sequences over all ranks
    sequence_length: int  # tokens per sequence
    dtype: torch.dtype  # of the activations
    num_chunks: int = 1  # of the tokens of a MoE layer

    @property
    def local_tokens(self) -> tuple[int, int]:
        """Number of sequences and number of tokens of each sequence on this rank.

        Raises a ValueError if the axes that shard the tokens do not divide the global batch.
        """
        tokens, mesh, local = self.plan.tokens, self.plan.mesh, []
        for axes, argument in ((tokens.batch_axes, "batch_size"), (tokens.length_axes, "sequence_length")):
            length, num_parts = getattr(self, argument), mesh.size(*axes)
            if length % num_parts:
                product = " * ".join(f"{axis}={mesh.size(axis)}" for axis in axes)
                raise ValueError(f"{argument} ({length}) must be divisible by {product}, over which it is sharded")
            local.append(length // num_parts)
        return local[0], local[1]

    def micro_batches(self, count: int) -> Iterator["PlannedBatch"]:
        """Yield the micro-batches, the largest first. Raises a ValueError as `local_tokens`, and for an empty batch."""
        for name in ("batch_size", "sequence_length"):
            check_int(name, getattr(self, name), at_least=1)
        rows, _ = self.local_tokens
        for index in range(count):
            yield replace(self, batch_size=(rows // count + (index < rows % count)) * (self.batch_size // rows))

    def has_module(self, path: str) -> bool:
        """Return whether the plan of a part of a model has the module at a path, not only its parts."""
        return path in self.plan and self.plan[path].module is self.plan.model.get_submodule(path)

    def trace(self) -> Trace:
        """Trace the forward of the model with the tokens and the parameters of a rank; see `trace`."""
        traced = traced_modules(self.plan.model)
        shapes = tuple(
            (name, parameter.used.shard_shape(parameter.parameter.shape))
            for name, parameter in (self.plan.parameters.items() if traced else ())
            if any(parameter.used.spec) and name.rpartition(".")[0] in traced
        )
        return trace(self.plan.model, *self.local_tokens, shapes)

    def dispatches(self) -> Iterator[tuple[str, PlannedDispatch]]:
        """List the tokens that a rank dispatches in every MoE layer, with the path of the layer."""
        num_tokens = math.prod(self.local_tokens)
        for path, (layer, dispatch) in self.plan.layers.items():
            tokens = PlannedDispatch(
                dispatch,
                num_tokens,
                dispatch.num_chunks(self.num_chunks),
                layer.expert_dtype,
                is_recomputed=self.plan.recomputed_by(path) is not None,
                recomputes_input="dispatch" in layer.recompute,
                expert_bytes=_expert_bytes(self.plan, f"{path}.experts.".removeprefix("."), dispatch),
            )
            yield path, tokens

    def saved_tensors(self) -> Iterator[tuple[str, SavedTensor]]:
        """List the tensors that autograd saves on a rank, with the path of the module."""
        yield from self.declared_tensors()
        for (saved_by, argument_of), count in self.trace().saved.items():
            if self.has_module(saved_by):
                is_argument = any(outer in self.plan and self.plan[outer].is_recomputed for outer in argument_of)
                path = None if is_argument else self.plan.recomputed_by(saved_by)
                yield path or "", SavedTensor((count,), (None,), torch.uint8, is_kept=path is None)
        for path, tokens in self.dispatches():
            layer, dispatch = self.plan.layers[path]
            # Attributed to the routed experts, because they are recomputed together.
            experts = next(inner for inner, planned in self.plan.items() if planned.module is layer.routed_experts)
            for tensor in dispatch.strategy_class.planned_saved_tensors(tokens):
                yield experts, tensor

    def declared_tensors(self) -> Iterator[tuple[str, SavedTensor]]:
        """List the tensors of `saved_tensors` that modules declare."""
        plan, _ = self.plan, self.local_tokens
        residual = {
            "activation_batch": plan.mesh.size(*plan.tokens.batch_axes),
            "activation_length": plan.mesh.size(*plan.tokens.length_axes),
            "activation_embed": plan.mesh.size(*plan.embed_axes),
        }
        for path, module in plan.items():
            declaration = declaration_of(module.module)
            if declaration.saved_tensors is None:
                continue
            computed_in_parts = map(tensor_parallel_activation, declaration.tensor_parallel_dims)
            num_parts = residual | dict.fromkeys(computed_in_parts, plan.mesh.size(*module.tensor_parallel_axes))
            for tensor in declaration.saved_tensors(self.batch_size, self.sequence_length).values():
                yield path, tensor._replace(shape=_local_shape(plan, module, tensor, num_parts))


def _expert_bytes(plan: Plan, prefix: str, dispatch: DispatchPlan) -> tuple[tuple[int, bool], ...]:
    """Return the bytes of one expert in each stack of weights, factors and parts of quantized weights included."""
    return tuple(
        (parameter.bytes(parameter.used) // dispatch.num_local_experts, parameter.is_trained)
        for name, parameter in plan.parameters.items()
        if name.startswith(prefix)
    )


def _local_shape(plan: Plan, module: ModulePlan, tensor: SavedTensor, num_parts: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape on a rank, given the number of parts of each activation dim."""
    local = [length // num_parts.get(name or "", 1) for length, name in zip(tensor.shape, tensor.names, strict=True)]
    num_dims = len(EXPERT_TOKEN_DIMS)
    if tensor.names[:num_dims] != EXPERT_TOKEN_DIMS:
        return tuple(local)
    # The rows of all tokens are on the ranks of their experts: each axis of the tokens or of the experts divides them.
    axes = {*plan.tokens.axes, *(() if module.dispatch is None else module.dispatch.expert_axes)}
    return (math.prod(local[:num_dims]) // plan.mesh.size(*axes), *local[num_dims:])


def message_bytes(model: nn.Module, batch: PlannedBatch) -> int:
    """Count the bytes of the hidden states of a batch that a rank passes to the next stage."""
    boundary = Boundary(model, batch.plan)
    inputs = torch.empty(batch.local_tokens, dtype=torch.int64)
    return boundary.local_part(boundary.hidden_states(MicroBatch(inputs, None, {}))).nbytes
