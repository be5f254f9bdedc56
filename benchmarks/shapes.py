"""The shapes, named once."""

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


A = Shape(num_tokens=2048, hidden_size=512, intermediate_size=1024, num_experts=8, top_k=2)
B = Shape(num_tokens=2048, hidden_size=512, intermediate_size=192, num_experts=64, top_k=8)

TRAINING = {"A": A, "B": B, "small": B._replace(num_tokens=128)}
DECODING = {"decode16": B._replace(num_tokens=16), "decode1": B._replace(num_tokens=1)}
LOCAL = {"local": B._replace(num_tokens=8192)}
ROUTE = {"route": B._replace(num_tokens=16384, num_experts=256)}
ROWS = {str(hidden_size): RowsShape(16384, hidden_size) for hidden_size in (512, 1001, 2048, 4096, 7168)}
