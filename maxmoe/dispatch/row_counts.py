"""Row counts that are all-gathered before the rows are communicated."""

import torch
from torch import Tensor

from maxmoe._torch import process_group_named
from maxmoe.named_collectives import all_gather


@torch.library.custom_op("maxmoe_dispatch::all_gather_counts", mutates_args=())
def all_gather_counts(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """All-gather row counts ``(n,)`` to ``(P, n)``, on the device of the counts and on the host.

    An operator, so that `maxmoe.keep_routing` keeps its result: a recomputation neither communicates nor synchronizes
    the device again. It takes the name of the group, since operators take no groups.
    """
    group = process_group_named(group_name)
    gathered = counts.new_empty(group.size() * len(counts))
    all_gather(gathered, counts.contiguous(), "row counts", group=group)
    gathered = gathered.view(group.size(), len(counts))
    return gathered, gathered.to("cpu", copy=True)


@all_gather_counts.register_fake
def _(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    gathered = counts.new_empty(process_group_named(group_name).size(), len(counts))
    return gathered, torch.empty_like(gathered, device="cpu")
