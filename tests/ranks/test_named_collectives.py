"""Named collectives of torch.distributed: results, and errors of ranks that call different ones."""

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from maxmoe.ranks import named_collectives
from support.run_ranks import run_ranks


def test_values() -> None:
    def check() -> None:
        rank = dist.get_rank()
        before, mine = named_collectives.num_started(), torch.arange(4.0).view(2, 2) + 10 * rank
        whole = mine.new_empty(4, 2)
        named_collectives.all_gather(whole, mine, "x")
        assert whole.equal(torch.cat([torch.arange(4.0).view(2, 2), torch.arange(4.0).view(2, 2) + 10]))
        part = mine.new_empty(1, 2)
        named_collectives.reduce_scatter(part, mine, "x")
        assert part.equal((2 * torch.arange(4.0).view(2, 2) + 10)[rank : rank + 1])
        total = mine.clone()
        named_collectives.all_reduce(total, "x")
        assert total.equal(2 * torch.arange(4.0).view(2, 2) + 10)
        received = mine.new_empty(2, 2)
        named_collectives.all_to_all(received, mine, [1, 1], [1, 1], "x").wait()
        assert received.equal(whole[rank::2])
        named_collectives.broadcast(mine, "x")
        assert mine.equal(whole[:2])
        assert named_collectives.num_started() == before + 5

    run_ranks(check, 2)


def in_another_order(rank: int) -> None:
    values = {"a": torch.ones(3), "b": torch.zeros(3)}
    for name in ("b", "a") if rank else ("a", "b"):
        named_collectives.all_reduce(values[name], name)
    assert values["a"].equal(torch.ones(3))


def of_another_kind(rank: int) -> None:
    named_collectives.broadcast(torch.ones(3), "x") if rank else named_collectives.all_reduce(torch.ones(3), "x")


DIFFERENCES: list[tuple[Callable[[int], None], str]] = [
    (in_another_order, r"the all-reduce of a, float32 \(3,\), rank 1 has the .* b"),
    (of_another_kind, "the all-reduce of x, .* rank 1 has the broadcast of x"),
    (
        lambda rank: named_collectives.all_reduce(torch.ones(3).to([torch.float32, torch.int32][rank]), "x"),
        "the all-reduce of x, float32 .* rank 1 .* int32",
    ),
    (lambda rank: named_collectives.all_reduce(torch.ones(3 + rank), "x"), r".* \(3,\), rank 1 .* \(4,\)"),
]


def test_what_is_compared_if_the_environment_variable_is_set() -> None:
    """Without it, collectives of equal size in another order exchange wrong values."""

    def check() -> None:
        os.environ.pop(named_collectives.CHECK_VARIABLE, None)
        in_another_order(dist.get_rank())
        os.environ[named_collectives.CHECK_VARIABLE] = "1"
        for call, expected in DIFFERENCES:
            with pytest.raises(ValueError, match=rf"must agree on the next collective: rank 0 has {expected}"):
                call(dist.get_rank())

    run_ranks(check, 2)
