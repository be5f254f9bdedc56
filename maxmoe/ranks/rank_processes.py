"""Starts one process per rank, which talk to each other through gloo, and finds the rank that failed first.

The processes are forked from the forkserver of `multiprocessing`: a separate process that has imported torch and has
computed nothing. It has one thread during a fork: NumPy's OpenBLAS, which has others, ends them before. The caller may
have other threads and is not forked: a lock that another thread holds during a fork stays locked in the new process,
which waits for it without end.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from maxmoe.ranks.failures import RankError, is_lost_connection

GRACE = 5.0  # seconds that ranks have to notice the failure of another one
# Imported once, in the process that forks the others: besides torch, what DTensor and FSDP2 import at their first use.
PRELOADED = ["maxmoe.ranks.rank_processes", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]


@dataclass(frozen=True)
class RankProcesses:
    """Settings of the processes that run a function on several ranks.

    Attributes:
        timeout: seconds for a collective of the default process group.
        deadline: seconds for everything; ranks that still run then are hung.
        prepare: function that each process calls before `torch.distributed` is initialized.
    """

    timeout: float = 60.0
    deadline: float = 120.0
    prepare: Callable[[], object] | None = None

    def run(self, function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
        """Call a function on every rank, where `torch.distributed` is initialized, and return the results by rank.

        Raises:
            RankError: if a rank failed, died or hung: with the traceback of the one that failed first, and the stacks
                of those that hung.
        """
        __tracebackhide__ = True  # for pytest
        return self._run(num_ranks, function, arguments)

    def run_alone(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one process, where `torch.distributed` is not initialized, and return its result."""
        __tracebackhide__ = True
        return self._run(None, function, arguments)[0]

    def _run(self, num_ranks: int | None, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """Call a function on every rank, or in one process without `torch.distributed` if `num_ranks` is None."""
        __tracebackhide__ = True
        sys.stdout.flush()
        sys.stderr.flush()
        numbers = range(num_ranks or 1)
        with tempfile.TemporaryDirectory() as folder:
            box, make = Path(folder), _context().Process  # type: ignore[attr-defined]
            settings = box, self, num_ranks, dict(os.environ), function, arguments
            processes: list[BaseProcess] = [make(target=_main, args=(number, *settings)) for number in numbers]
            try:
                for process in processes:
                    process.start()
                hung = _wait(processes, self.deadline)
                _dump_stacks(processes, hung)
            finally:
                for process in processes:
                    if process.pid is not None:
                        process.kill()
                        process.join()
            names = ["one process" if num_ranks is None else f"rank {number} of {num_ranks}" for number in numbers]
            _raise_first_failure(box, names, [process.exitcode for process in processes], hung)
            return [pickle.loads((box / f"{number}.result").read_bytes()) for number in numbers]


def _context() -> BaseContext:
    """The forkserver; where there is none, processes that import everything again."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _main(
    number: int,
    box: Path,
    processes: RankProcesses,
    num_ranks: int | None,
    environment: Mapping[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> NoReturn:
    """Run the function in a started process; `os._exit` skips destructors that may wait for dead peers.

    `environment` has the environment variables of the parent; a process of the forkserver begins with its server's.
    """
    torch.set_num_threads(1)  # first of all: the threads of OpenMP are not forked, and waiting for them hangs
    code = 1
    try:
        with (box / f"{number}.stack").open("w") as stack:
            faulthandler.enable(stack)
            if hasattr(signal, "SIGUSR1"):
                faulthandler.register(signal.SIGUSR1, stack)
            os.environ.clear()  # before the first thread, which may read it without a lock
            os.environ.update(environment)
            threading.Thread(target=_end_with_parent, daemon=True).start()
            if processes.prepare is not None:
                processes.prepare()
            if num_ranks is not None:
                _init_process_group(box, number, num_ranks, processes.timeout)
            result = function(*arguments)
            if num_ranks is not None:
                dist.barrier()
            (box / f"{number}.result").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException as error:
        failure = is_lost_connection(error), time.time(), traceback.format_exc()
        (box / f"{number}.error").write_bytes(pickle.dumps(failure))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with_parent() -> None:
    """End this process when the process that started it has ended, also by a signal that nothing can handle."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _init_process_group(box: Path, rank: int, num_ranks: int, timeout: float) -> None:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{box}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
    )


def _wait(processes: list[BaseProcess], deadline: float) -> list[int]:
    """Wait for the end of all processes; return those that have not come to it."""
    end = time.monotonic() + deadline
    while running := [number for number, process in enumerate(processes) if process.exitcode is None]:
        now = time.monotonic()
        if any(process.exitcode for process in processes):
            end = min(end, now + GRACE)
        if now > end:
            return running
        wait([processes[number].sentinel for number in running], end - now)
    return []


def _dump_stacks(processes: list[BaseProcess], hung: list[int]) -> None:
    if hasattr(signal, "SIGUSR1"):
        for number in hung:
            os.kill(processes[number].pid or 0, signal.SIGUSR1)
        time.sleep(0.2 if hung else 0)


def _raise_first_failure(box: Path, names: list[str], exit_codes: list[int | None], hung: list[int]) -> None:
    """Tell the cause from its symptoms: the message of a rank that lost a peer comes last."""
    __tracebackhide__ = True
    failures = []
    for number, code in enumerate(exit_codes):
        error = box / f"{number}.error"
        if number in hung or (box / f"{number}.result").exists():
            continue
        has_lost, when, text = False, 0.0, f"it died: exit code {code}"
        stack = box / f"{number}.stack"
        if not stack.exists():
            text += ", before its first line, see its output. A script must start processes under "
            text += 'if __name__ == "__main__"'
        elif crashed_at := stack.read_text().rstrip():
            text += f", at:\n{crashed_at}"
        if error.exists():
            has_lost, when, text = pickle.loads(error.read_bytes())
        failures.append((has_lost, when, number, text.rstrip()))
    if not failures and not hung:
        return
    failures.sort()
    parts = []
    if failures and not (hung and failures[0][0]):
        parts.append(f"{names[failures[0][2]]} failed first:\n{failures.pop(0)[3]}")
    if failures:
        parts.append(f"ranks that failed too: {sorted(number for _, _, number, _ in failures)}")
    for number in hung:
        stack = box / f"{number}.stack"
        place = stack.read_text().rstrip() if stack.exists() else "its start, before its first line"
        parts.append(f"{names[number]} hung at:\n{place}")
    if len(parts) > 1:
        parts.append("TORCH_DISTRIBUTED_DEBUG=DETAIL tells whether all ranks called the same collectives")
    raise RankError("\n\n".join(parts))
