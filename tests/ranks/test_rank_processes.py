"""The processes of `compare_ranks` are forked from a process that has one thread."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from maxmoe.ranks.rank_processes import RankProcesses
from support.programs import Program


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
    with Program([sys.executable, str(tmp_path / "main.py"), str(folder)]) as program:
        wait_until(lambda: len(os.listdir(folder)) == 2)
        program.process.kill()
        wait_until(lambda: not any(Path("/proc", pid).exists() for pid in os.listdir(folder)))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for at most two minutes."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
