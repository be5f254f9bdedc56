"""Module of the projections before and after latent experts."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from maxmoe.config import MoEConfig
from maxmoe.declaration import TOKEN_DIMS, Declaration, SavedTensor
from maxmoe.ops import gmm


class LatentProjection(nn.Module):
    """Linear map between tokens and the rows of latent experts: x @ weight. All routed experts share it.

    The projection "in", before the experts, has a `weight` [D, L], the projection "out", after their weighted sum,
    [L, D]. What is sent to experts on other ranks has L elements per row.

    Args:
        config: config of the layer; L is its latent_size.
        direction: "in" or "out".
        **options: device and dtype of the parameter.

    Source: NVIDIA Nemotron 3 (LatentMoE); Megatron-LM, `fc1_latent_proj` and `fc2_latent_proj`.
    """

    weight: Tensor

    def __init__(self, config: MoEConfig, direction: Literal["in", "out"], **options: Any) -> None:
        super().__init__()
        self.direction = direction
        sizes, self._names = (config.hidden_size, config.row_size), ("embed", "latent")
        if direction == "out":
            sizes, self._names = sizes[::-1], self._names[::-1]
        self.weight = nn.Parameter(torch.empty(sizes, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight so that the projection preserves the variance of its input."""
        nn.init.normal_(self.weight, std=self.weight.shape[0] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Project rows.

        Args:
            x: ``(T, D)``, or ``(T, L)`` for "out", floating.

        Returns:
            ``(T, L)``, or ``(T, D)`` for "out", dtype of x. A row is bitwise independent of the other rows.
        """
        return gmm(x, self.weight.unsqueeze(0), torch.full((1,), x.shape[0], device=x.device))

    @property
    def declaration(self) -> Declaration:
        """Declare logical names, the input dim and saved tensors."""
        return Declaration(
            logical_names={"weight": self._names},
            input_dims={"weight": self._names[0]},
            saved_tensors=self._saved_tensors,
        )

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        """Describe the saved tensors; `MoE` declares the input of the projection "in"."""
        saved = {"group_sizes": SavedTensor((1,), (None,), torch.int64)}
        if self.direction == "out":
            saved["input"] = SavedTensor((batch, length, self.weight.shape[0]), (*TOKEN_DIMS, None))
        return saved
