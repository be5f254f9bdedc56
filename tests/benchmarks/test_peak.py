"""Peak memory and saved bytes, as the benchmarks measure them."""

import json

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks import peak, shapes
from benchmarks.contender import AutogradContender

# The optional libraries need multiples of 32.
SHAPE = shapes.Shape(num_tokens=7, hidden_size=64, intermediate_size=32, num_experts=4, top_k=2)


def test_maxmoe_saves_what_the_formula_says() -> None:
    request = json.dumps(["maxmoe", list(SHAPE), "float32", "forward+backward", 1, None])
    numbers = peak.answer(request)
    T, D, F, _, K = SHAPE
    assert numbers["saved"] == 4 * T * (D + 2 * K * F)
    # slots, rows and weights: int64, int64 and float32; sizes of the groups
    assert numbers["saved_indices"] <= T * K * (8 + 8 + 4) + 8 * SHAPE.num_experts


class Spends(AutogradContender):
    """Needs a buffer of 64 MiB, returns 48 MiB and saves two tensors of x's size."""

    def __init__(self) -> None:
        self.leaves = {"x": torch.ones(7, 3, requires_grad=True), "weights": torch.ones(1)}

    def forward(self) -> Tensor:
        output = torch.ones(48 * 2**20, dtype=torch.uint8)
        torch.ones(64 * 2**20, dtype=torch.uint8)
        return output

    def compute(self) -> Tensor:
        return self.leaves["x"].sin().exp()


def test_peak_and_saved_bytes_of_a_known_function() -> None:
    numbers = peak.peak(Spends(), "forward")
    assert numbers["returned"] == 48 * 2**20
    assert numbers["buffers"] == pytest.approx(64 * 2**20, abs=3 * 2**20)
    assert numbers["kept"] < 3 * 2**20
    assert peak.saved_for_backward(Spends()) == {"saved": 2 * 4 * 21, "saved_indices": 0}
