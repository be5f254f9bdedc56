"""The noise of random routing, the same for a token on whatever rank it is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WholeNoise(TorchFunctionMode):
    """In it, `torch.randn_like` draws the noise of the whole batch, and returns that of this rank's tokens.

    Args:
        seed: of the noise.
        shape: B and S of the whole batch.
        part: the slices of this rank.
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
