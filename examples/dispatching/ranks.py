"""Runs a function on several processes of this machine, the ranks of `torch.distributed`."""

import logging
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from pretraining import InputError

# Imported once, and not on every rank.
PRELOADED = ["matplotlib.figure", "maxmoe.parallel", "torch._dynamo", "torch.distributed.fsdp", "tqdm"]
TIMEOUT = timedelta(minutes=2)  # for each collective
PATIENCE = 5.0  # seconds to wait for errors of other ranks: the first error that arrives may not be the cause
SYMPTOMS = ("Connection closed by peer", "Connection reset by peer")  # messages of a rank whose peer failed
KILLED = "the process was killed, perhaps for want of memory"


def run_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any, advance: Callable[[], None]) -> list[Any]:
    """Call a function on several ranks, each a new process that ends when the function returns.

    The processes are forked from a separate process that has imported torch and has one thread. This process may have
    others: a lock that another thread holds during a fork stays locked in the new process.

    Args:
        function: function of a module, called with `arguments` and a function without arguments; when rank 0 calls the
            latter, this process calls `advance`.
        num_ranks: number of ranks. With one, `torch.distributed` is not initialized.
        *arguments: arguments of `function` on each rank.
        advance: called in this process.

    Returns:
        The return values in the order of ranks.

    Raises:
        InputError: if a rank was killed.
        RuntimeError: if a rank failed, with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        receivers = []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            given = (folder, rank, num_ranks, sender, function, arguments)
            process = context.Process(target=rank_main, args=given, daemon=True)
            process.start()
            stack.callback(end, process)
            sender.close()  # in this process, so that the receiver notices when the rank ends
            receivers.append(stack.enter_context(receiver))
        return collect(receivers, advance)


def end(process: BaseProcess) -> None:
    """Kill a process and wait until it has ended."""
    process.kill()
    process.join()


def collect(receivers: list[Connection], advance: Callable[[], None]) -> list[Any]:
    """Wait for the results of all ranks; raise an error if a rank fails."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}  # by rank, in order of arrival
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
    """Run `function` in a new process and exit without destructors, which may wait for other ranks."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the ranks
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # hides hints about the order of all-gathers
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
