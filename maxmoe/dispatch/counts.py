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


KEPT_OPERATORS.add(torch.ops.maxmoe_dispatch.all_gather_counts.default)
