"""Noise of random routing that does not depend on which rank has a token."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WholeNoise(TorchFunctionMode):
    """Mode in which `torch.randn_like` draws noise for the whole batch and returns the part of this rank's tokens.

    Args:
        seed: seed of the noise.
        shape: ``(B, S)`` of the whole batch.
        part: slices of this rank's tokens in the batch.
    """

    def __init__(self, seed: int, shape: tuple[int, int], part: tuple[slice, ...]) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.shape, self.part = shape, part

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch.randn_like:
            return func(*args, **(kwargs or {}))
        tokens: Tensor = args[0]  # [T, E]
        whole = torch.randn(*self.shape, tokens.shape[1], generator=self.generator, dtype=tokens.dtype)
        return whole[self.part].reshape(tokens.shape)
