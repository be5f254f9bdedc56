"""The shapes and routings with which every operator is tested."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes, and `route`: the expert of slot number s, -1 for none."""

    name: str
    num_tokens: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    route: Callable[[int], int]

    def experts(self) -> Tensor:
        slots = range(self.num_tokens * self.top_k)
        ids = torch.tensor([self.route(slot) for slot in slots], dtype=torch.int64)
        return ids.reshape(self.num_tokens, self.top_k)

    def __str__(self) -> str:
        return self.name


def scattered(num_experts: int) -> Callable[[int], int]:
    """Some expert for each slot, the low ones far more often; a token may ask for the same one twice."""
    return lambda slot: min((slot * 2654435761 % 1009) ** 2 * num_experts // 1009**2, num_experts - 1)


SKEWED = Shape("skewed", 20, 8, 3, 12, 6, scattered(8))
NO_TOKEN = Shape("no_token", 0, 4, 2, 8, 4, lambda slot: 0)
EMPTY_EXPERTS = Shape("empty_experts", 10, 9, 2, 8, 4, lambda slot: 1 + 2 * (slot % 3))
ODD_WIDTHS = Shape("odd_widths", 13, 5, 3, 17, 11, scattered(5))
UNROUTED = Shape("unrouted", 11, 4, 2, 8, 4, lambda slot: -1 if slot % 5 < 3 else slot % 4)
# Larger than the kernels' blocks of rows and columns, and no multiple of them.
SEVERAL_BLOCKS = Shape("several_blocks", 101, 3, 2, 131, 67, scattered(3))
# Enough work that it is spread over threads.
MANY_ROWS = Shape("many_rows", 700, 7, 3, 66, 35, scattered(7))
# For finite differences in float64.
TINY = Shape("tiny", 4, 3, 2, 3, 2, lambda slot: -1 if slot == 5 else slot * 5 % 3)

SHAPES = [
    Shape("balanced", 12, 6, 2, 8, 4, lambda slot: slot % 6),
    SKEWED,
    Shape("all_to_one", 9, 4, 1, 8, 5, lambda slot: 2),
    Shape("one_token", 1, 4, 2, 8, 4, lambda slot: 3 - slot),
    NO_TOKEN,
    EMPTY_EXPERTS,
    ODD_WIDTHS,
    Shape("width_one", 6, 3, 2, 1, 1, scattered(3)),
    Shape("one_expert", 5, 1, 1, 6, 3, lambda slot: 0),
    UNROUTED,
    Shape("all_unrouted", 3, 4, 2, 8, 4, lambda slot: -1),
    SEVERAL_BLOCKS,
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
