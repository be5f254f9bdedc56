"""The bytes that a rank sends, counted where torch dispatches collectives."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "all-gather": r"all_?gather",
    "reduce-scatter": r"reduce_scatter",
    "all-reduce": r"all_?reduce",
    "all-to-all": r"all_?to_?all",
}


class SentBytes(TorchDispatchMode):
    """In it, `counts` adds up the bytes of collectives by kind.

    An all-to-all sends the rows for other ranks. For the others they are those of a ring of n ranks: of the largest
    tensor (n - 1) / n, twice that for an all-reduce.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = next((kind for kind, pattern in KINDS.items() if re.search(rf"c10d\w*\.\w*{pattern}", str(func))), None)
        if kind is not None:
            leaves = tree_leaves((args, result))
            group = next(found for leaf in leaves if (found := group_of(leaf)) is not None)
            if kind == "all-to-all":
                self.counts[kind] += sent_to_others(func, args, group)
            else:
                largest = max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
                passes = 2 if kind == "all-reduce" else 1
                self.counts[kind] += passes * largest * (group.size() - 1) // group.size()
        return result


def group_of(argument: Any) -> dist.ProcessGroup | None:
    """Return the group if the argument is one: functional collectives name it, the others have it."""
    if isinstance(argument, str) and argument not in ("sum", "avg"):
        return dist.distributed_c10d._resolve_process_group(argument)
    return dist.ProcessGroup.unbox(argument) if "ProcessGroup" in str(argument) else None


def sent_to_others(func: Callable[..., Any], args: Sequence[Any], group: dist.ProcessGroup) -> int:
    """Count the rows of an all-to-all that leave this rank."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    rows: Tensor = given["input"]
    splits = given["input_split_sizes"] or [len(rows) // group.size()] * group.size()
    return (sum(splits) - splits[group.rank()]) * math.prod(rows.shape[1:]) * rows.element_size()
