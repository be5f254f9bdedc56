"""Run a function on several ranks, each a forked process that talks to the others through gloo.

Forking takes a hundredth of the time of starting: the children have torch and everything else already.
"""

import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # DTensor's first operator imports it: once, here, and not in every child
import torch.distributed as dist
import torch.distributed.tensor  # likewise
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from maxmoe.sharding import LogicalRules
from maxmoe.sharding.rules import PRESETS

for preset in PRESETS.glob("*.yaml"):
    LogicalRules.load(preset.stem)  # keeps the rules: parsed once, here, and not in every child

# What a rank says whose peer is gone, or did not come.
SYMPTOMS = ("Connection closed by peer", "Connection reset by peer", "Timed out", "timed out", "monitoredBarrier")
GRACE = 5.0  # seconds that ranks have to notice the failure of another one


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 60.0,
    deadline: float = 120.0,
    debug: bool = False,
) -> list[Any]:
    """Call a function on every rank.

    Args:
        function: anything callable, closures included; `torch.distributed` is initialised when it is called.
        world_size: number of ranks.
        *arguments: of every call.
        timeout: seconds for a collective of the default group.
        deadline: seconds for everything; ranks that still run then are hung.
        debug: compare the collectives of all ranks before they run, which takes half as much time again.

    Returns:
        What it returned, by rank.

    Raises:
        RuntimeError: if a rank failed, died or hung: with the traceback of the one that failed first, and the stacks
            of those that hung.
    """
    __tracebackhide__ = True  # by pytest
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory() as folder:
        box, context = Path(folder), multiprocessing.get_context("fork")
        ranks: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(box, rank, world_size, function, arguments, timeout, debug))
            for rank in range(world_size)
        ]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                for process in ranks:
                    process.start()
            hung = _wait(ranks, deadline)
            _dump_stacks(ranks, hung)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        _raise_first_failure(box, [process.exitcode for process in ranks], hung)
        return [pickle.loads((box / f"{rank}.result").read_bytes()) for rank in range(world_size)]


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a large world whose collectives return at once, without values."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # It holds meshes of the fake group, and would hand them to equal ones of ranks that are forked later.
        _clear_sharding_prop_cache()


def _rank_main(
    box: Path,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout: float,
    debug: bool,
) -> NoReturn:
    """What a forked process does: `os._exit` skips destructors that may wait for dead peers."""
    torch.set_num_threads(1)  # first of all: the threads of OpenMP are not forked, and waiting for them hangs
    code = 1
    try:
        with (box / f"{rank}.stack").open("w") as stack:
            faulthandler.register(signal.SIGUSR1, stack)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.set_debug_level(dist.DebugLevel.DETAIL if debug else dist.DebugLevel.OFF)
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{box}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            result = function(*arguments)
            dist.barrier()
            (box / f"{rank}.result").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        (box / f"{rank}.error").write_text(f"{time.time()}\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: list[BaseProcess], deadline: float) -> list[int]:
    """Wait for the end of all ranks; return those that have not come to it."""
    end = time.monotonic() + deadline
    while running := [rank for rank, process in enumerate(ranks) if process.exitcode is None]:
        now = time.monotonic()
        if any(process.exitcode for process in ranks):
            end = min(end, now + GRACE)
        if now > end:
            return running
        wait([ranks[rank].sentinel for rank in running], end - now)
    return []


def _dump_stacks(ranks: list[BaseProcess], hung: list[int]) -> None:
    for rank in hung:
        os.kill(ranks[rank].pid or 0, signal.SIGUSR1)
    time.sleep(0.2 if hung else 0)


def _raise_first_failure(box: Path, exit_codes: list[int | None], hung: list[int]) -> None:
    """Tell the cause from its symptoms: what other ranks say of a lost peer comes last."""
    __tracebackhide__ = True
    failures = []
    for rank, code in enumerate(exit_codes):
        error = box / f"{rank}.error"
        if rank in hung or code == 0:
            continue
        when, text = 0.0, f"it died: exit code {code}"
        if error.exists():
            first_line, _, text = error.read_text().partition("\n")
            when = float(first_line)
        failures.append((any(symptom in text for symptom in SYMPTOMS), when, rank, text.rstrip()))
    if not failures and not hung:
        return
    failures.sort()
    parts = []
    if failures and not (hung and failures[0][0]):
        parts.append(f"rank {failures[0][2]} of {len(exit_codes)} failed first:\n{failures.pop(0)[3]}")
    if failures:
        parts.append(f"ranks that failed too: {sorted(rank for _, _, rank, _ in failures)}")
    for rank in hung:
        parts.append(f"rank {rank} of {len(exit_codes)} hung at:\n{(box / f'{rank}.stack').read_text().rstrip()}")
    if len(parts) > 1:
        parts.append("run_ranks(..., debug=True) says whether all ranks called the same collectives")
    raise RuntimeError("\n\n".join(parts))
