"""The runner of the multi-rank tests: its results, and its errors if ranks raise, die or hang."""

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.run_ranks import fake_rank, run_ranks


def failure(function, world_size: int, **options: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        run_ranks(function, world_size, **options)
    return str(caught.value)


def all_reduce() -> None:
    dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_returns_its_result(world_size: int) -> None:
    summands = torch.arange(4.0)

    def total(factor: int) -> tuple[int, list[float], int]:
        summand = summands * factor
        dist.all_reduce(summand)
        return dist.get_rank(), summand.tolist(), torch.get_num_threads()

    expected = (summands * 2 * world_size).tolist()
    assert run_ranks(total, world_size, 2) == [(rank, expected, 1) for rank in range(world_size)]


def test_it_works_after_products_on_many_threads() -> None:
    torch.set_num_threads(2)
    matrix = torch.randn(512, 512)
    expected = float((matrix @ matrix).sum())
    for result in run_ranks(lambda: float((matrix @ matrix).sum()), 2):
        assert result == pytest.approx(expected)


def test_the_rank_that_raised_comes_before_its_victims() -> None:
    def raise_on_rank_1() -> None:
        all_reduce()  # until then, ranks may still connect, and wait for a dead one until the timeout
        if dist.get_rank() == 1:
            raise KeyError("no such thing")
        all_reduce()

    message = failure(raise_on_rank_1, 3)
    assert message.startswith("rank 1 of 3 failed first:\nTraceback")
    assert "KeyError: 'no such thing'\n\nranks that failed too: [0, 2]" in message


def test_a_rank_that_dies_is_named() -> None:
    def die_on_rank_2() -> None:
        if dist.get_rank() == 2:
            os._exit(7)
        all_reduce()

    assert failure(die_on_rank_2, 3).startswith("rank 2 of 3 failed first:\nit died: exit code 7\n\n")


def test_the_stack_of_a_rank_that_crashes() -> None:
    def crash() -> None:
        signal.raise_signal(signal.SIGSEGV)

    message = failure(crash, 1)
    assert "it died: exit code -11, at:\nFatal Python error: Segmentation fault" in message
    assert re.search(r'File ".*test_run_ranks.py", line \d+ in crash\n', message)


def test_the_stack_of_a_rank_that_hangs() -> None:
    def hang_on_rank_0() -> None:
        if dist.get_rank() == 0:
            time.sleep(1000)

    message = failure(hang_on_rank_0, 2, deadline=6)
    assert "rank 0 of 2 hung at:" in message and "in hang_on_rank_0" in message


def test_collectives_that_do_not_match() -> None:
    def mismatch() -> None:
        dist.all_reduce(torch.ones(2 + dist.get_rank()))

    assert "Detected mismatch between collectives on ranks" in failure(mismatch, 2, debug=True)


def test_a_fake_rank_of_a_large_world() -> None:
    with fake_rank(1000, 1024):
        assert (dist.get_rank(), dist.get_world_size()) == (1000, 1024)
        all_reduce()
    assert not dist.is_initialized()
