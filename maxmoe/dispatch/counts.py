"""Integers that every rank must know of all others before rows can travel."""

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.dispatch.transfer import all_gather_single
from maxmoe.nn.recompute import KEPT_OPERATORS


@torch.library.custom_op("maxmoe_dispatch::all_gather_counts", mutates_args=())
def all_gather_counts(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Gather integers of all ranks, on the device and on the host.

    An operator, so that `maxmoe.keep_routing` keeps its result: a recomputation neither communicates nor waits for the
    device again.

    Args:
        counts: ``(n,)``, integer.
        group_name: of the process group.

    Returns:
        ``(P, n)`` on the device of counts, and the same on the host.
    """
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type,attr-defined]
    gathered = counts.new_empty(group.size() * len(counts))
    all_gather_single(gathered, counts.contiguous(), group=group)
    gathered = gathered.view(group.size(), len(counts))
    return gathered, gathered.to("cpu", copy=True)


@all_gather_counts.register_fake
def _(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type,attr-defined]
    gathered = counts.new_empty(group.size(), len(counts))
    return gathered, torch.empty_like(gathered, device="cpu")


@torch.library.custom_op("maxmoe_dispatch::host_counts", mutates_args=())
def host_counts(counts: Tensor) -> Tensor:
    """Copy integers to the host; an operator for the same reason as `all_gather_counts`.

    Args:
        counts: integer, on any device.

    Returns:
        The same on the host.
    """
    return counts.to("cpu", copy=True)


@host_counts.register_fake
def _(counts: Tensor) -> Tensor:
    return torch.empty_like(counts, device="cpu")


KEPT_OPERATORS.update(
    {torch.ops.maxmoe_dispatch.all_gather_counts.default, torch.ops.maxmoe_dispatch.host_counts.default}
)
