"""Counts the bytes that a rank sends, with a dispatch mode that intercepts the collectives of torch."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from maxmoe._torch import TorchDispatchMode, argument_names, group_of_collective, tree_leaves

KINDS = {
    "all-gather": r"all_?gather",
    "reduce-scatter": r"reduce_scatter",
    "all-reduce": r"all_?reduce",
    "all-to-all": r"all_?to_?all",
}


class SentBytes(TorchDispatchMode):
    """Dispatch mode that adds up the bytes of collectives by kind in `counts`, and their number in `times`.

    For an all-to-all, these are the rows for other ranks. For other collectives, they are the bytes of a ring algorithm
    on n ranks: (n - 1) / n of the largest tensor, twice this number for an all-reduce.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.times: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if kind is not None:
            self.times[kind] += 1
            leaves = tree_leaves((args, result))
            group = group_of_collective(leaves)
            is_ragged = kind == "all-to-all"
            self.counts[kind] += (
                sent_to_others(func, args, group) if is_ragged else on_a_ring(kind, leaves, group.size())
            )
        return result


@cache
def kind_of(func: Callable[..., Any]) -> str | None:
    """Return the kind of a collective, None for any other operator."""
    # Collectives inside an operator of maxmoe are not dispatched by torch.
    operators = r"(c10d\w*|maxmoe_dispatch)\.\w*"
    return next((kind for kind, pattern in KINDS.items() if re.search(operators + pattern, str(func))), None)


def on_a_ring(kind: str, leaves: Sequence[Any], num_ranks: int) -> int:
    """Bytes sent by a collective other than an all-to-all."""
    largest = max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return (2 if kind == "all-reduce" else 1) * largest * (num_ranks - 1) // num_ranks


def sent_to_others(func: Callable[..., Any], args: Sequence[Any], group: dist.ProcessGroup) -> int:
    """Bytes of the rows that an all-to-all sends to other ranks."""
    given = dict(zip(argument_names(func), args, strict=False))
    rows: Tensor = given["input"]
    splits = given["input_split_sizes"] or [len(rows) // group.size()] * group.size()
    return (sum(splits) - splits[group.rank()]) * math.prod(rows.shape[1:]) * rows.element_size()
