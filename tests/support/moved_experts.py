"""Layers so small that moving an expert would take longer than it saves, made to move experts all the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

from maxmoe.parallel.dispatch import expert_moves, least_loaded
from maxmoe.parallel.dispatch.lent_experts import LentExperts


@contextmanager
def free_moves() -> Iterator[None]:
    """Sending weights costs nothing: they are sent to save a few rows if a rank has more rows than the bound."""
    with patch.object(least_loaded, "FLOP_PER_BYTE", {"cpu": 0, "cuda": 0}):
        yield


@contextmanager
def moving_experts(expected: bool) -> Iterator[None]:
    """Move experts for every row above the mean; this rank must take part in a move if and only if `expected`."""
    compute = patch.object(LentExperts, "compute", autospec=True, side_effect=LentExperts.compute)
    with free_moves(), patch.object(expert_moves, "TRIED_PERCENT", (100,)), compute as lent:
        yield
    assert lent.called == expected


@contextmanager
def moves_on_any_rank() -> Iterator[Callable[[], bool]]:
    """Give a function that all ranks call: whether any of them has computed an expert of another rank."""
    with patch.object(LentExperts, "compute", autospec=True, side_effect=LentExperts.compute) as lent:
        yield lambda: is_true_anywhere(lent.called)


def is_true_anywhere(value: bool) -> bool:
    anywhere = torch.tensor(int(value))
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    return bool(anywhere)
