"""A tensor-parallel module of the user: ranks compute parts of dims of any name."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from maxmoe.costs import estimate
from maxmoe.parallel import Declaration
from maxmoe.sharding import LogicalRules, Mesh


class BiasedFeedForward(nn.Module):
    """A tensor-parallel module whose first parameter has no dim "embed", with custom names of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up_bias, self.up = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16, 8))
        names = {"up_bias": ("ffn",), "up": ("ffn", "columns")}
        self.declaration = Declaration(logical_names=names, tensor_parallel_dims={"ffn": 16})

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.up.T + self.up_bias) @ self.up


def saved(module: nn.Module, sizes: dict[str, int], axes: tuple[str, ...]) -> int:
    """The bytes that a rank saves for 2 sequences of 4 tokens."""
    rules = LogicalRules([("ffn", axes), ("activation_ffn", axes), ("columns", None)])
    costs = estimate(
        module,
        Mesh.planned(sizes),
        rules,
        batch_size=2,
        sequence_length=4,
        allow_unused=True,
        inputs=lambda *tokens: (torch.empty(*tokens, 8),),
    )
    return costs.memory["activations"]


@pytest.mark.parametrize("size", [1, 4])
def test_dims_of_any_name(size: int) -> None:
    """The input is whole, what is between the two products is a part."""
    assert saved(BiasedFeedForward(), {"tensor": size}, ("tensor",)) == 2 * 4 * (8 + 16 // size) * 4


def test_axes_together_divide_the_number_of_parts() -> None:
    """Two heads with eight channels each can be divided by either of two axes, but not by both."""
    heads, axes = BiasedFeedForward(), ("tensor", "context")
    heads.declaration = replace(heads.declaration, tensor_parallel_dims={"ffn": 2})
    assert saved(heads, dict.fromkeys(axes, 2), axes) == 2 * 4 * (8 + 16 // 2) * 4
