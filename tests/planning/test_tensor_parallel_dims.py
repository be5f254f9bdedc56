"""`estimate` of a tensor-parallel module of the user."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from maxmoe.parallel import Declaration, SavedTensor
from maxmoe.planning import estimate
from maxmoe.sharding import LogicalRules, Mesh


class BiasedFeedForward(nn.Module):
    """A tensor-parallel module whose first parameter has no dim "embed", with custom names of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up_bias, self.up = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16, 8))
        self.declaration = Declaration(
            logical_names={"up_bias": ("ffn",), "up": ("ffn", "embed")},
            tensor_parallel_dims={"ffn": 16},
            saved_tensors=self.saved_tensors,
        )

    def saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        return {"inner": SavedTensor((batch, length, 16), ("activation_batch", "activation_length", "activation_ffn"))}

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.up.T + self.up_bias) @ self.up


def test_tensor_parallel_dims_of_any_name() -> None:
    rules = LogicalRules([("ffn", "tensor"), ("activation_ffn", "tensor")])
    step = {"batch_size": 2, "sequence_length": 4}
    for size in (1, 4):
        costs = estimate(BiasedFeedForward(), Mesh.planned({"tensor": size}), rules, allow_unused=True, **step)
        assert costs.memory["activations"] == 2 * 4 * 16 * 4 // size
    unnamed = BiasedFeedForward()
    unnamed.declaration = replace(unnamed.declaration, logical_names={"up_bias": ("ffn",), "up": ("ffn", None)})
    with pytest.raises(ValueError, match=r"must have the logical name 'embed' or 'embed_attn', got {'up_bias'"):
        estimate(unnamed, Mesh.planned({"tensor": 2}), rules, allow_unused=True, **step)


def test_axes_together_divide_the_number_of_parts() -> None:
    """Two heads with eight channels each can be divided by either of two axes, but not by both."""
    heads, axes = BiasedFeedForward(), ("tensor", "context")
    heads.declaration = replace(heads.declaration, tensor_parallel_dims={"ffn": 2})
    rules = LogicalRules([("ffn", axes), ("activation_ffn", axes)])
    costs = estimate(heads, Mesh.planned(dict.fromkeys(axes, 2)), rules, batch_size=2, sequence_length=4)
    assert costs.memory["activations"] == 2 * 4 * 16 * 4 // 2
