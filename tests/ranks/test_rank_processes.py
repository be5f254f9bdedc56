"""Processes of ranks: results, errors if ranks raise, die or hang, and one thread in the process that forks them."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from maxmoe.ranks.rank_processes import RankProcesses
from support.programs import started, wait_until
from support.run_ranks import run_ranks


def failure(function: Callable[[], object], world_size: int, **options: bool | float) -> str:
    with pytest.raises(RuntimeError) as caught:
        run_ranks(function, world_size, **options)  # type: ignore[arg-type]
    return str(caught.value)


def all_reduce() -> None:
    dist.all_reduce(torch.ones(2))


def test_every_rank_returns_its_result() -> None:
    """Closures and their tensors arrive on the ranks, also after products on many threads."""
    torch.set_num_threads(2)
    matrix = torch.randn(512, 512)
    expected = float((matrix @ matrix).sum())

    def total(factor: int) -> tuple[int, float, int]:
        summand = factor * (matrix @ matrix).sum()
        dist.all_reduce(summand)
        return dist.get_rank(), float(summand), torch.get_num_threads()

    assert run_ranks(total, 3, 2) == [(rank, pytest.approx(6 * expected), 1) for rank in range(3)]


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
    assert re.search(r'File ".*test_rank_processes.py", line \d+ in crash\n', message)


def test_the_stack_of_a_rank_that_hangs() -> None:
    def hang_on_rank_0() -> None:
        if dist.get_rank() == 0:
            time.sleep(1000)

    message = failure(hang_on_rank_0, 2, deadline=6)
    assert "rank 0 of 2 hung at:" in message and "in hang_on_rank_0" in message


def num_threads_of_parent() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def test_the_forkserver_has_one_thread() -> None:
    """Imported libraries keep no threads during a fork."""
    assert RankProcesses().run_alone(num_threads_of_parent) == 1


PROGRAM = """
import os, sys, time
from pathlib import Path
from maxmoe.ranks.rank_processes import RankProcesses

def sleep(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    RankProcesses().run(sleep, 2, sys.argv[1])
"""


def test_ranks_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Ranks that are left would go on waiting, and use the processor."""
    (tmp_path / "main.py").write_text(PROGRAM)
    folder = tmp_path / "ranks"
    folder.mkdir()
    with started([sys.executable, str(tmp_path / "main.py"), str(folder)]) as finish:
        wait_until(lambda: len(os.listdir(folder)) == 2)
        finish(signal.SIGKILL)
        wait_until(lambda: not any(Path("/proc", pid).exists() for pid in os.listdir(folder)))
