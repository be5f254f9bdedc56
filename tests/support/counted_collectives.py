"""The collectives that a rank really takes part in, counted where torch dispatches them."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dispatching.sent_bytes import kind_of, on_a_ring
from maxmoe._torch import group_of_collective
from maxmoe.sharding import Mesh


class CountedCollectives(TorchDispatchMode):
    """Counts calls and bytes in `counts`, by kind and axis, "a, b" for a group over both.

    The bytes are sent and received by a rank on a ring: (n - 1) / n of the largest tensor of a gather or scatter, twice
    this number for an all-reduce; in an all-to-all the maximum of the bytes sent to and received from other ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        groups = (axes for count in range(len(mesh.axes)) for axes in itertools.combinations(mesh.axes, count + 1))
        self.axis_of = {mesh.ranks_along(*axes): ", ".join(axes) for axes in groups}

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
            leaves = tree_leaves((args, result))
            group = group_of_collective(leaves)
            counted = self.counts[kind, self.axis_of[tuple(dist.get_process_group_ranks(group))]]
            counted[0] += 1
            counted[1] += _exchanged(args, group) if kind == "all-to-all" else on_a_ring(kind, leaves, group.size())
        return result


def _exchanged(arguments: Sequence[Any], group: dist.ProcessGroup) -> int:
    """Bytes exchanged with other ranks. Output, input and their splits are arguments in this order."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    splits = [argument for argument in arguments if isinstance(argument, list)]
    shares = []
    for tensor, counts in zip(tensors, splits, strict=True):
        of_others = sum(counts) - counts[group.rank()]
        shares.append(of_others * tensor[:1].numel() * tensor.itemsize)
    return max(shares)
