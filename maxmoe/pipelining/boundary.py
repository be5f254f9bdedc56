"""Shape and dtype of the hidden states between stages, and a check of the loss, without computing anything."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe._torch import FakeTensorMode, shares_memory, tree_map
from maxmoe.parallel.plan.plan import Plan
from maxmoe.pipelining.micro_batches import MicroBatch
from maxmoe.pipelining.stage import Loss, check_loss, first_tensor
from maxmoe.pipelining.stage_modules import StagePart, stage_module
from maxmoe.sharding.redistribute import embed_sharding


class Boundary:
    """Finds the shape and dtype of the hidden states between stages for a micro-batch, and checks the loss.

    The first and the last part of the whole model run on fake tensors, on every rank, before parameters are sharded. An
    error in the inputs or in the loss is therefore raised on every rank, before anything is sent. The blocks need not
    run, because they keep the shape and dtype of the hidden states.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        # Not the meta device, which has no autocast of another device, and mixes with no tensors of it.
        self._mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = plan.mesh.device_type
        self._mesh, self._embed_axes = plan.mesh, plan.embed_axes
        parts = StagePart((), True, False), StagePart((), False, False), StagePart((), False, True)
        self._first, self._between, self._last = (self._as_fake(stage_module(model, part)) for part in parts)

    def _as_fake(self, module: nn.Module) -> nn.Module:
        """Copy a module; the parameters and buffers of the copy are fake tensors."""
        with self._mode:
            copies: dict[int, Any] = {}
            for tensor in (*module.parameters(), *module.buffers()):
                empty = torch.empty_like(tensor, device=self._device)
                copies[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
            return copy.deepcopy(module, copies)

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Return a fake tensor like the hidden states, before they are sharded; raise if the model changes them."""
        with self._mode, torch.no_grad():
            inputs, _, options = tree_map(self._fake, micro_batch)
            hidden_states = first_tensor(self._first(inputs, **options))
            if not shares_memory(first_tensor(self._between(hidden_states, **options)), hidden_states):
                raise ValueError(
                    f"{type(self._between).__name__} must not compute with the hidden states outside of its "
                    "pipeline_parts, because every stage would do so: with all parts absent, it must return its input. "
                    "If it adds what a block returns to them, declare removes_blocks=True"
                )
            return hidden_states

    def local_part(self, hidden_states: Tensor) -> Tensor:
        """Return the part of the hidden states that a rank passes on, if the residual stream is sharded."""
        shape = embed_sharding(self._mesh, hidden_states.dim(), self._embed_axes).shard_shape(hidden_states.shape)
        # gloo cannot send an empty message.
        return torch.empty((max(1, shape[0]), *shape[1:]), dtype=hidden_states.dtype, device="meta")

    def check_loss(self, loss: Loss, hidden_states: Tensor, micro_batch: MicroBatch) -> None:
        """Raise if the loss is not a scalar. A loss that fails on fake tensors is checked when it is computed."""
        with self._mode:
            _, targets, options = tree_map(self._fake, micro_batch)
            output = self._last(torch.empty_like(hidden_states), **options)
            try:
                value = loss(output, targets)
            except Exception:
                return
        check_loss(value)

    def _fake(self, value: Any) -> Any:
        return self._mode.from_tensor(value) if isinstance(value, Tensor) else value
