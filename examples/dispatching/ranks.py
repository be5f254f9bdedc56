"""Processes of this machine that run one function together, as the ranks of torch.distributed."""

import logging
import multiprocessing
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch._dynamo  # DTensor's first operator imports it: once, here, and not on every rank
import torch.distributed as dist
import torch.distributed.fsdp  # likewise
import torch.distributed.tensor  # likewise

from pretraining import InputError

TIMEOUT = timedelta(minutes=2)  # of every collective
PATIENCE = 5.0  # seconds for other ranks to say what went wrong: the first to notice need not be the first to fail
SYMPTOMS = ("Connection closed by peer", "Connection reset by peer")  # of another rank's failure
KILLED = "the process was killed, perhaps for want of memory"


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, advance: Callable[[], None]) -> list[Any]:
    """Call a function in as many new processes, which end with it.

    They are forked: torch is imported once, and their memory is their own from there on.

    Args:
        function: called with the arguments, and with a function that rank 0 calls to let `advance` be called here.
        num_ranks: of `torch.distributed`; with one it is not initialised.
        *arguments: for every rank.
        advance: called here.

    Returns:
        What it returned, by rank.

    Raises:
        InputError: if a rank was killed.
        RuntimeError: if a rank failed, with its traceback.
    """
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        receivers = []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            given = (folder, rank, num_ranks, sender, function, arguments)
            process = context.Process(target=rank_main, args=given, daemon=True)
            process.start()
            stack.callback(end, process)
            sender.close()  # here: the receiver then notices the end of the process
            receivers.append(stack.enter_context(receiver))
        return collect(receivers, advance)


def end(process: BaseProcess) -> None:
    """End a process, whatever it does."""
    process.kill()
    process.join()


def collect(receivers: list[Connection], advance: Callable[[], None]) -> list[Any]:
    """Wait for the results of all ranks, or for the first failures."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}  # in the order of their coming
    running = dict(enumerate(receivers))
    while running:
        ready = wait(running.values(), PATIENCE if failures else None)
        if not ready:
            break
        for rank in [rank for rank, receiver in running.items() if receiver in ready]:
            try:
                what, value = receivers[rank].recv()
            except EOFError:
                what, value = "failure", KILLED
            if what == "advance":
                advance()
                continue
            del running[rank]
            (results if what == "result" else failures)[rank] = value
    if failures:
        causes = [rank for rank, text in failures.items() if not any(symptom in text for symptom in SYMPTOMS)]
        first = (causes or [*failures])[0]
        kind = InputError if failures[first] == KILLED else RuntimeError
        raise kind(f"rank {first} of {len(receivers)}: {failures[first]}")
    return [results[rank] for rank in range(len(receivers))]


def rank_main(
    folder: str, rank: int, num_ranks: int, sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """What a forked process does. It ends at once: destructors may wait for other ranks."""
    torch.set_num_threads(1)  # first of all: threads are not forked, and waiting for them hangs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it has advice on the order of gathers
    try:
        if num_ranks > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        result = function(*arguments, lambda: sender.send(("advance", None)) if rank == 0 else None)
        if num_ranks > 1:
            dist.barrier()
        sender.send(("result", result))
    except Exception:
        sender.send(("failure", traceback.format_exc().rstrip()))
    finally:
        os._exit(0)
