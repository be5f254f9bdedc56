"""Check that all ranks have the same settings, before a collective depends on them."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def check_ranks_agree(
    facts: Mapping[str, str], device_type: str = "cpu", group: dist.ProcessGroup | None = None
) -> None:
    """Raise a ValueError on every rank of a group if `facts`, texts by name, or their order differ; it names both.

    Ranks with different settings run different collectives, or collectives of different shapes. torch then hangs until
    the timeout or aborts, and names neither setting.
    """
    # One all-reduce of a hash suffices if the ranks agree; the texts are gathered for the error message only. MAX over
    # the hash and its negative gives the largest and the smallest hash. Seven bytes fit into an int64 with either sign.
    text = "\n".join(f"{name}={fact}" for name, fact in facts.items())
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], device=device_type)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes[0] == -extremes[1]:
        return
    ranks = dist.get_process_group_ranks(group)
    all_facts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(all_facts, dict(facts), group=group)
    for rank, theirs in zip(ranks, all_facts, strict=True):
        for name in {**all_facts[0], **theirs}:
            ours, other = (found.get(name, "nothing") for found in (all_facts[0], theirs))
            if ours != other:
                raise ValueError(f"the ranks must agree on {name}: rank {ranks[0]} has {ours}, rank {rank} has {other}")
        for ours, other in zip(all_facts[0], theirs, strict=True):
            if ours != other:
                raise ValueError(
                    f"the order must be the same on all ranks: rank {ranks[0]} has {ours} where rank {rank} has {other}"
                )
    raise AssertionError("the hashes of the ranks differ, and their facts do not")
