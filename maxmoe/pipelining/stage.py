"""Module that a stage of `torch.distributed.pipelining` runs: one micro-batch through the part of a model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe._torch import reshaped, tree_leaves
from maxmoe.nn import Checkpointed, MoELayer
from maxmoe.parallel.apply.fsdp import reset_fsdp
from maxmoe.parallel.apply.parameter_hooks import leave_units
from maxmoe.pipelining.micro_batches import MicroBatch
from maxmoe.pipelining.stage_modules import StagePart

# Function of the output of a model and its targets.
Loss: TypeAlias = Callable[[Any, Any], Tensor]


class Stage(nn.Module):
    """Runs the part of a model that one stage has; the last stage also computes the loss.

    The schedule passes the number of the micro-batch, and the hidden states of the previous stage. All messages between
    stages have the shape of the largest micro-batch: smaller ones are padded after the last row, and cut again before
    the model sees them.

    `model` is a `stage_module`, `copied` the modules of the whole model of which it has copies, each with its copy.
    """

    def __init__(
        self,
        index: int,
        part: StagePart,
        model: nn.Module,
        copied: Sequence[tuple[nn.Module, nn.Module]],
        loss: Loss,
    ) -> None:
        super().__init__()
        self.index, self.model = index, model
        self.is_first, self.is_last = part.is_first, part.is_last
        self.boundary = torch.empty(0, device="meta")  # hidden states of the largest micro-batch
        self._copied, self._loss = tuple(copied), loss
        self._micro_batches: list[MicroBatch] = []
        self._losses: list[Tensor] = []

    @property
    def needs_whole_backward(self) -> bool:
        """Whether a split backward computes all gradients at once.

        torch goes through the graph of the weights once for the gradients of the inputs and once for each group of
        weights. A part that is recomputed as a whole would be recomputed each time, and the graph of a parameter that
        several modules share is freed after the first time.
        """
        parameters = [parameter for _, parameter in self.model.named_parameters(remove_duplicate=False)]
        is_recomputed = any(isinstance(part, Checkpointed) and part.is_recomputed for part in self.model.modules())
        return is_recomputed or len(set(parameters)) < len(parameters)

    def recover(self) -> None:
        """Bring the stage into the state before a step that an exception has ended."""
        leave_units()
        reset_fsdp(self)
        self.end()

    def begin(self, micro_batches: list[MicroBatch]) -> None:
        """Set the micro-batches of a step, and the mode of the model in the copies of its modules."""
        self._micro_batches, self._losses = micro_batches, []
        for module, copied in self._copied:
            copied.training = module.training

    def end(self) -> list[Tensor]:
        """Return the losses of the micro-batches in the last stage, and drop the micro-batches."""
        losses, self._micro_batches, self._losses = self._losses, [], []
        return losses

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield the tensors whose gradients a split backward computes apart from the gradients of the inputs.

        Besides the parameters, these are the sums of `StatsAccumulator`, which are leaves of the graph as well.
        """
        yield from super().parameters(recurse)
        for layer in self.model.modules() if recurse else ():
            if isinstance(layer, MoELayer) and layer.metrics_accumulator is not None:
                yield layer.metrics_accumulator.leaf

    def forward(self, x: Tensor, micro_batch: Tensor) -> Tensor:
        """Run a micro-batch, given its number ``(1,)`` and the hidden states of the previous stage.

        Returns hidden states for the next stage, or the loss ``()`` in the last one.
        """
        inputs, targets, options = self._micro_batches[int(micro_batch)]
        num_rows = len(inputs)
        if not self.is_first:
            # No view and no leaf, so that a block may modify the hidden states in place.
            inputs = reshaped(x[:num_rows], (num_rows, *x.shape[1:]))
        output = self.model(inputs, **options)
        if self.is_last:
            loss = self._loss(output, targets)
            check_loss(loss)
            self._losses.append(loss.detach())
            # The schedule detaches the loss in place after the backward, which it cannot do with a view.
            return reshaped(loss.contiguous(), ())
        hidden_states = first_tensor(output)
        found = tuple(hidden_states.shape), hidden_states.dtype
        expected = (num_rows, *self.boundary.shape[1:]), self.boundary.dtype
        if found != expected:
            raise ValueError(
                f"the blocks of stage {self.index} must keep the shape and dtype of the hidden states {expected}, got "
                f"{found}"
            )
        missing = len(self.boundary) - num_rows
        if missing:
            return F.pad(hidden_states, (0, 0) * (hidden_states.dim() - 1) + (0, missing))
        return reshaped(hidden_states.contiguous(), tuple(hidden_states.shape))


def first_tensor(output: Any) -> Tensor:
    """Return the hidden states in the output of a stage: its first tensor."""
    found = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if found is None:
        raise TypeError(f"the output of a stage must have a tensor, got {type(output).__name__}")
    return found


def check_loss(value: Any) -> None:
    """Raise a ValueError if the loss of a micro-batch is not a scalar tensor."""
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        got = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss must return the sum of the losses of all tokens as a 0-dim tensor, got {got}")
