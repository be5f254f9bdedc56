"""The named shapes."""

from collections.abc import Mapping
from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of the experts; written 2048x512x1024x8x2 (T, D, F, E, K)."""

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int

    @property
    def num_rows(self) -> int:
        """R: one row for every token and each of its experts."""
        return self.num_tokens * self.top_k


class RowsShape(NamedTuple):
    """Sizes of a table of rows; written 16384x512 (R, D)."""

    num_rows: int
    hidden_size: int


class ProductShape(NamedTuple):
    """Sizes of one matrix product, ``(R, D)`` by ``(D, F)``; written 256x768x768 (R, D, F)."""

    num_rows: int
    hidden_size: int
    intermediate_size: int


AnyShape = Shape | RowsShape | ProductShape

# The letters of sizes in the documentation.
LETTERS = {
    "num_tokens": "T",
    "num_rows": "R",
    "hidden_size": "D",
    "intermediate_size": "F",
    "num_experts": "E",
    "top_k": "K",
}

A = Shape(num_tokens=2048, hidden_size=512, intermediate_size=1024, num_experts=8, top_k=2)
B = Shape(num_tokens=2048, hidden_size=512, intermediate_size=192, num_experts=64, top_k=8)
QWEN3 = Shape(num_tokens=2048, hidden_size=2048, intermediate_size=768, num_experts=64, top_k=8)

TRAINING = {"A": A, "B": B, "small": B._replace(num_tokens=128)}
DECODING = {"decode16": B._replace(num_tokens=16), "decode1": B._replace(num_tokens=1)}
LOCAL = {"local": B._replace(num_tokens=8192)}
ADAPTERS = {"adapters": Shape(num_tokens=1024, hidden_size=1024, intermediate_size=512, num_experts=32, top_k=4)}
MUON = {"muon": B._replace(num_tokens=8192, hidden_size=256)}
ROUTE = {"route": B._replace(num_tokens=16384, num_experts=256)}
ROWS = {str(hidden_size): RowsShape(16384, hidden_size) for hidden_size in (512, 1001, 2048, 4096, 7168)}
PRODUCTS = {f"R256-{size}": ProductShape(256, size, size) for size in (768, 2048)}

# Qwen3-30B-A3B with half or all of its experts, Mixtral 8x7B, and the experts of DeepSeek-V3 that one of 8 ranks holds.
PUBLISHED = {
    "qwen3": QWEN3,
    "qwen3-T512": QWEN3._replace(num_tokens=512),
    "qwen3-T1024-E128": QWEN3._replace(num_tokens=1024, num_experts=128),
    "mixtral": Shape(num_tokens=1024, hidden_size=4096, intermediate_size=14336, num_experts=8, top_k=2),
    "deepseek": Shape(num_tokens=1024, hidden_size=7168, intermediate_size=2048, num_experts=32, top_k=8),
}
PUBLISHED_DECODING = {
    f"qwen3-E{num_experts}-decode{num_tokens}": QWEN3._replace(num_tokens=num_tokens, num_experts=num_experts)
    for num_experts in (64, 128)
    for num_tokens in (1, 4, 16, 64)
}
# Qwen3-30B-A3B and gpt-oss-20b.
FROZEN = {
    "qwen3-30b": QWEN3._replace(num_experts=128),
    "gpt-oss": Shape(num_tokens=2048, hidden_size=2880, intermediate_size=2880, num_experts=32, top_k=4),
}

# Shapes with too few tokens for training.
FORWARD_ONLY = frozenset(DECODING | PUBLISHED_DECODING)


def named(kind: type[AnyShape]) -> Mapping[str, AnyShape]:
    """All named shapes of a kind."""
    tables: list[Mapping[str, AnyShape]] = [TRAINING, DECODING, PUBLISHED, PUBLISHED_DECODING, LOCAL, MUON, ROUTE]
    tables += [ADAPTERS, FROZEN, ROWS, PRODUCTS]
    return {name: shape for table in tables for name, shape in table.items() if isinstance(shape, kind)}
