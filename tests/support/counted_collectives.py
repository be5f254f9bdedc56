"""The collectives that a rank really takes part in, counted where torch dispatches them."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from maxmoe.sharding import Mesh

KINDS = {
    "all-gather": r"all_?gather",
    "reduce-scatter": r"reduce_scatter",
    "all-reduce": r"all_?reduce",
}


class CountedCollectives(TorchDispatchMode):
    """In it, `counts` gathers times and bytes by kind and axis.

    The bytes are those that a rank sends, and receives, on a ring: of the largest tensor of a gather or scatter
    (n - 1) / n, twice that for an all-reduce.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        self.axis_of = {tuple(dist.get_process_group_ranks(mesh[axis].get_group())): axis for axis in mesh.axes}

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
            largest = max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            ranks = tuple(dist.get_process_group_ranks(self._group(leaves)))
            passes = 2 if kind == "all-reduce" else 1
            counted = self.counts[kind, self.axis_of[ranks]]
            counted[0] += 1
            counted[1] += passes * largest * (len(ranks) - 1) // len(ranks)
        return result

    def _group(self, leaves: Sequence[Any]) -> dist.ProcessGroup:
        """Functional collectives name their group, the others have it."""
        for leaf in leaves:
            if isinstance(leaf, str) and leaf not in ("sum", "avg"):
                return dist.distributed_c10d._resolve_process_group(leaf)
            if "ProcessGroup" in str(leaf):
                return dist.ProcessGroup.unbox(leaf)
        raise AssertionError("a collective without a group")
