"""Gradient scaling for float16 whose scale and skipped steps are equal on all ranks."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from maxmoe._torch.amp import ScalerWithHooks
from maxmoe._torch.dtensor import UNSCALE, handler_of, set_handler
from maxmoe.parallel.clip_grad_norm import is_of_a_stage, with_local_gradient
from maxmoe.ranks.named_collectives import all_reduce


class GradScaler(ScalerWithHooks):
    """A `torch.amp.GradScaler` that skips a step on all ranks if a gradient on any of them is infinite or NaN.

    Scale and growth tracker are equal on all ranks, for DTensors of any placements on any meshes, plain parameters
    and `maxmoe.pipeline`. `step`, or `unscale_` before it, is collective over all ranks of torch.distributed: each
    calls it for equally many optimizers, in the same order, also if their parameters have no gradients.

    Args:
        device: device type of the losses, "cuda" or "cpu".
        **options: init_scale, growth_factor, backoff_factor, growth_interval, enabled, as in `torch.amp.GradScaler`.

    Example::

        scaler = maxmoe.parallel.GradScaler("cpu")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        maxmoe.parallel.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Source: `torch.amp.GradScaler`; https://github.com/pytorch/pytorch/issues/132816
    """

    def _unscaled(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return plain parameters, and tensors whose gradients are the local shards of DTensors."""
        return [*map(with_local_gradient, parameters)]

    def _found(self, by_device: dict[torch.device, Tensor], zero: Tensor) -> dict[torch.device, Tensor]:
        """Return whether gradients on any rank are infinite or NaN."""
        if not dist.is_initialized():
            return by_device
        anywhere = sum((each.to(zero.device) for each in by_device.values()), zero)
        all_reduce(anywhere, "whether gradients are infinite")
        return {anywhere.device: anywhere.sign()}  # fused optimizers compare with 1


@functools.cache
def refuse_wrong_scalers() -> None:
    """Let torch's scaler raise where ranks would skip different steps, once per process."""
    unscale = handler_of(UNSCALE)

    def checked(call: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not _is_reduced(arguments[0]):
            raise RuntimeError(
                "torch.amp.GradScaler reduces the overflow of gradients over the mesh axes of the first one alone, so "
                "that ranks would skip different steps: use maxmoe.parallel.GradScaler"
            )
        return unscale(call, arguments, options)

    set_handler(UNSCALE, checked)


def _is_reduced(gradients: Sequence[Tensor]) -> bool:
    """Return whether the axes that shard the first gradient shard all others."""
    if is_of_a_stage(gradients[0]) or not all(isinstance(gradient, DTensor) for gradient in gradients):
        return False
    first, *others = (_ranks_with_others(gradient) for gradient in gradients)
    return all(other <= first for other in others)


def _ranks_with_others(gradient: Any) -> set[tuple[int, ...]]:
    """Return this rank's part of each mesh axis along which ranks hold other values of a gradient."""
    return {
        tuple(dist.get_process_group_ranks(gradient.device_mesh.get_group(dim)))
        for dim, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    }
