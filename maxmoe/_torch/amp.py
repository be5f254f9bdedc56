"""Private names of `torch.amp.GradScaler`: what it unscales, and what it found there."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class ScalerWithHooks(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with functions around its only one that reads gradients.

    It makes its scale at once. torch waits for the first loss, which not all ranks of a pipeline have.
    """

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        super().__init__(device, **options)
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(torch.device(device))

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        unscaled: Any = SimpleNamespace(param_groups=[{"params": self._unscaled(parameters)}])
        return self._found(super()._unscale_grads_(unscaled, inv_scale, found_inf, allow_fp16), found_inf)

    def _unscaled(self, parameters: Iterable[Tensor]) -> Sequence[Tensor]:
        """Return the tensors whose gradients are unscaled in place, given the parameters of an optimizer."""
        raise NotImplementedError

    def _found(self, by_device: dict[torch.device, Tensor], zero: Tensor) -> dict[torch.device, Tensor]:
        """Return 1 by device where an optimizer skips its step, else 0; `by_device` is 1 where gradients overflow."""
        raise NotImplementedError
