"""The processes of `compare_ranks` are forked from a process that has one thread."""

import os
import threading

import pytest

from maxmoe.testing.rank_processes import RankProcesses


def num_threads_of_parent() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def test_the_forkserver_has_one_thread() -> None:
    """No library that it has imported keeps threads during a fork."""
    assert RankProcesses().run_alone(num_threads_of_parent) == 1


def test_a_process_with_other_threads_does_not_fork() -> None:
    stopped = threading.Event()
    thread = threading.Thread(target=stopped.wait)
    thread.start()
    with pytest.raises(RuntimeError, match=r"a process that forks must have one thread, got \d"):
        RankProcesses("fork").run_alone(os.getpid)
    stopped.set()
    thread.join()
