"""The collectives of `torch.distributed` that this package runs, each with the name of what it communicates.

torch pairs the collectives of different ranks by their order alone. If one rank runs an additional collective, or the
ranks run two collectives in different orders, torch waits until the timeout, or exchanges wrong values if the sizes are
equal. With
``MAXMOE_CHECK_COLLECTIVES=1`` in the environment, the ranks compare the name, kind, dtype and shape of each collective
before it runs, and raise an error that names both sides. Each then takes several times as long.

`tests/parallel/test_collectives.py` lists what decides that each collective runs.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe._torch import all_gather_single, reduce_scatter_single
from maxmoe.ranks.agreement import check_ranks_agree

CHECK_VARIABLE = "MAXMOE_CHECK_COLLECTIVES"


class _Started:
    """Number of the collectives that this process has started, and the name of the last one."""

    number = 0
    name: str | None = None  # of what the next one communicates


def take_name() -> str | None:
    """Return the name of what the collective communicates that has just been announced, once."""
    name, _Started.name = _Started.name, None
    return name


def num_started() -> int:
    """Return how many collectives this process has started, except those of compiled graphs."""
    return _Started.number


def all_gather(
    output: Tensor, shard: Tensor, what: str, *, group: dist.ProcessGroup | None = None, is_async: bool = False
) -> dist.Work | None:
    """All-gather shards of equal size, in the order of the ranks; `what` names what is gathered."""
    _announce("all-gather", what, shard, shard.shape, group)
    work: dist.Work | None = all_gather_single(output, shard, group=group, async_op=is_async)
    return work


def reduce_scatter(
    output: Tensor, summand: Tensor, what: str, *, group: dist.ProcessGroup | None = None, is_async: bool = False
) -> dist.Work | None:
    """Sum over the ranks, and return each rank's part of the first dim."""
    _announce("reduce-scatter", what, summand, summand.shape, group)
    work: dist.Work | None = reduce_scatter_single(output, summand, group=group, async_op=is_async)
    return work


def all_reduce(tensor: Tensor, what: str, *, group: dist.ProcessGroup | None = None) -> None:
    """Sum over the ranks, in place."""
    _announce("all-reduce", what, tensor, tensor.shape, group)
    dist.all_reduce(tensor, group=group)


def all_to_all(
    output: Tensor,
    rows: Tensor,
    receive: list[int],
    send: list[int],
    what: str,
    *,
    group: dist.ProcessGroup | None = None,
) -> dist.Work:
    """Start to exchange rows: `send` rows with each rank, for `receive` rows from it."""
    _announce("all-to-all", what, rows, rows.shape[1:], group)
    work: dist.Work = dist.all_to_all_single(output, rows, receive, send, group=group, async_op=True)
    return work


def broadcast(tensor: Tensor, what: str, *, group: dist.ProcessGroup | None = None) -> None:
    """Copy the tensor of the first rank of the group to all of its ranks."""
    _announce("broadcast", what, tensor, tensor.shape, group)
    dist.broadcast(tensor, group=group, group_src=0)


def _announce(kind: str, what: str, tensor: Tensor, shape: torch.Size, group: dist.ProcessGroup | None) -> None:
    """Count a collective, and compare it with the one that the other ranks are about to run."""
    if torch.compiler.is_compiling():
        return
    _Started.number, _Started.name = _Started.number + 1, what
    if os.environ.get(CHECK_VARIABLE) == "1" and dist.get_backend(group) != "fake":  # which has one rank
        text = f"the {kind} of {what}, {str(tensor.dtype).removeprefix('torch.')} {tuple(shape)}"
        check_ranks_agree({"the next collective": text}, tensor.device.type, group)
