"""Errors that name the rank that failed first, instead of a closed connection or a timeout on the other ranks."""

import faulthandler
import itertools
import json
import os
import re
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from maxmoe._torch import default_store

T = TypeVar("T")

HEAD_START = 2.0  # seconds for which other ranks wait, because torchrun reports the rank that exits first
HEARTBEATS = 10  # number of heartbeats per patience
LEFT = "left"  # value in place of a heartbeat of a rank that has left `watch_ranks` without an error
# Texts in errors of gloo, which have no class of their own. Most begin with the name of a source file.
GLOO_ERRORS = ("/gloo/", "Application timeout caused pair closure", "monitoredBarrier")

LIBRARY_FILES = rf"site-packages|^<|/lib/python3|^{re.escape(str(Path(__file__).parents[1]))}/"

_uses = itertools.count()


class RankError(RuntimeError):
    """Error for the failure of another rank, which died, hangs or has raised an error."""


@contextmanager
def watch_ranks(patience: float = 10.0) -> Iterator[None]:
    """Context that raises an error on every rank with the rank that failed first.

    If a rank dies, hangs or raises, torch reports on other ranks that a connection was closed or a collective timed
    out. Around a training loop, `watch_ranks` finds the rank at fault and raises a `RankError` with its number and the
    known facts about its failure. A rank that raises keeps its own error. A thread on each rank sends about ten
    heartbeats per `patience` through the store of torch.distributed; there are no additional collectives.

    A rank that hangs is found `patience` seconds after the timeout of the collective that waits for it, see `Mesh`. It
    cannot be interrupted, so its process prints its stack and exits with status 1, as does a rank that is still running
    `patience` seconds after the failure of another rank. If the store does not answer for `patience` seconds, because
    its process is stopped, the error names that process.

    Args:
        patience: seconds without a heartbeat after which a rank counts as dead, and timeout in seconds for an answer of
            the store. torchrun waits 30 seconds for all ranks.

    Yields:
        Nothing. With one rank, `watch_ranks` has no effect.

    Raises:
        RankError: if another rank failed first.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    watch = Watch(patience)
    watch.start()
    try:
        yield
    except BaseException as error:
        if not is_lost_connection(error):
            watch.finish(partial(watch.report, [watch.rank], f"failed first: {type(error).__name__}: {error}"))
            raise
        with sigterm_ignored():
            entries = traceback.walk_tb(error.__traceback__)
            place = place_of([Line(f.f_code.co_filename, str(line), f.f_code.co_name) for f, line in entries])
            failure = watch.finish(partial(watch.find_failure, place))
            if dist.is_torchelastic_launched():
                time.sleep(HEAD_START)
        raise RankError(f"{failure.message} (rank {watch.rank} saw: {first_line(error)})") from None
    watch.finish(watch.leave)


@contextmanager
def sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM while the failure is reported: torchrun sends it to all ranks once one rank has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def is_lost_connection(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is torch's error for a lost connection or a timeout."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in GLOO_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False


class Line(NamedTuple):
    """Line of a stack or of a traceback."""

    file: str
    number: str
    function: str


def place_of(lines: list[Line]) -> str:
    """Return the innermost line that is neither in a library nor in this package; `lines` has the outermost first."""
    if not lines:
        return "an unknown line"
    own = [line for line in lines if not re.search(LIBRARY_FILES, line.file)]
    line = (own or lines)[-1]
    return f"{line.file}:{line.number} in {line.function}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, without the file name with which messages of gloo begin."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[/\S*/gloo/\S*\] ", "", lines[0])


class Failure(NamedTuple):
    """Failure that all ranks report: the ranks at fault, none if they are not known, and a text that names them."""

    ranks: list[int]
    message: str


STORE_IS_GONE = Failure([], "the process with the store of torch.distributed died: rank 0, or torchrun")


class Watch(threading.Thread):
    """Thread that sends heartbeats, and exits the process if it does not notice the failure of another rank.

    Heartbeats and the failure of all ranks are in the store of torch.distributed. The thread makes all calls on the
    store, so that the watched thread can stop waiting for them. `TCPStore.set_timeout` does not suffice: while the
    process with the store is stopped, its sockets stay open and calls block.
    """

    def __init__(self, patience: float) -> None:
        super().__init__(name="maxmoe.watch_ranks", daemon=True)
        self.rank, self.num_ranks, self.patience = dist.get_rank(), dist.get_world_size(), patience
        self.answered_at = -float("inf")  # when the store last answered
        self._store: Any = default_store()
        self._prefix = f"maxmoe.watch_ranks/{next(_uses)}"
        self._watched = threading.get_ident()
        self._stacks = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, open as long as the thread
        self._stopped = threading.Event()
        self._last_call: Callable[[], Any] = self.leave
        self._result: Any = STORE_IS_GONE

    def run(self) -> None:
        """Send heartbeats until `finish` is called, then make its last call."""
        with suppress(dist.DistError):  # the process with the store is gone
            # A separate connection: on torch's, the creation of a process group may block until all ranks arrive.
            self._store = PrefixStore(self._prefix, self._store.clone())
            self._send_heartbeats()
            self._result = self._last_call()

    def finish(self, last_call: Callable[[], T]) -> T | Failure:
        """Stop the heartbeats; return the result of a last call on the store, or a `Failure` if it does not answer."""
        self._last_call = last_call
        self._stopped.set()
        begin = time.monotonic()
        while self.is_alive():
            left = max(begin, self.answered_at) + self.patience - time.monotonic()
            if left < 0:
                return self._silent_store()
            self.join(left)
        return self._result  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Record that this rank has left without an error and sends no more heartbeats."""
        self._store.set(f"heartbeat/{self.rank}", LEFT)

    def report(self, ranks: list[int], what: str) -> Failure:
        """Record the failure of ranks unless a failure is recorded already; return the recorded failure."""
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"
        failure = json.dumps(Failure(ranks, f"{names} of {self.num_ranks} {what}"))
        return Failure(*json.loads(self._store.compare_set("failure", "", failure)))

    def find_failure(self, place: str) -> Failure:
        """Return the recorded failure, or find the ranks at fault if none is recorded within the patience.

        `place` is the line at which this rank has lost the connection to other ranks.
        """
        self._store.set(f"lost/{self.rank}", place)
        before, end = self._heartbeats(), time.monotonic() + self.patience
        while time.monotonic() < end:
            if failure := self._failure():
                return failure
            time.sleep(self.patience / HEARTBEATS)
        return self.report(*self._ranks_at_fault(before, self._heartbeats()))

    def _send_heartbeats(self) -> None:
        """Write a counter and the line that the rank executes, again and again."""
        failed_at = None
        for count in itertools.count():
            self._store.set(f"heartbeat/{self.rank}", f"{count} {place_of(self._stack())}")
            if failure := self._failure():
                failed_at = failed_at or time.monotonic()
                if self.rank in failure.ranks or time.monotonic() > failed_at + self.patience:
                    self._exit(failure)
            if self._stopped.wait(self.patience / HEARTBEATS):
                return

    def _stack(self) -> list[Line]:
        """Return the lines that the watched thread executes, the outermost first.

        Its frames must not be walked here. A step makes a frame object, which may collect garbage, whose finalizers may
        let the other thread run: it leaves the frame, and the object refers to freed memory. faulthandler makes none.
        """
        self._stacks.seek(0)
        self._stacks.truncate()
        faulthandler.dump_traceback(self._stacks)
        self._stacks.seek(0)
        watched = self._stacks.read().partition(f"Thread 0x{self._watched:016x} ")[2].partition("\n\n")[0]
        return [Line(*line) for line in re.findall(r'^  File "(.*)", line (\S+) in (.*)$', watched, re.M)][::-1]

    def _exit(self, failure: Failure) -> None:
        """Exit the process, because the watched thread may be in a call that cannot be interrupted."""
        message = failure.message
        if self.rank in failure.ranks:
            message += "".join(f'\n  File "{file}", line {number}, in {name}' for file, number, name in self._stack())
        try:
            raise RankError(message)
        except RankError as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            get_error_handler().record_exception(error)  # for torchrun
        os._exit(1)

    def _silent_store(self) -> Failure:
        """Return the failure of a store that has not answered within the patience."""
        message = f"the process with the store of torch.distributed sends no heartbeat for {self.patience:g} s"
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            message += ": torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else ": rank 0"
        return Failure([], message)

    def _ranks_at_fault(self, before: list[str], now: list[str]) -> tuple[list[int], str]:
        """Return the ranks that have not recorded a lost connection, and a description of their failure."""
        at_work = [rank for rank in range(self.num_ranks) if now[rank] != LEFT and not self._get(f"lost/{rank}")]
        places = {rank: now[rank].partition(" ")[2] for rank in at_work}
        dead = [rank for rank in at_work if now[rank] == before[rank]]
        if dead:
            last = ", ".join(places[rank] or "the start" for rank in dead)
            return dead, f"died or hangs: no heartbeat for {self.patience:g} s, last seen at {last}"
        if at_work:
            return at_work, f"hangs at {', '.join(places.values())}"
        gone = [rank for rank in range(self.num_ranks) if now[rank] == LEFT]
        if gone:
            return gone, "came to the end before the others"
        waited = "; ".join(f"rank {rank} at {self._get(f'lost/{rank}')}" for rank in range(self.num_ranks))
        return [], (
            f"failed first: all waited until the timeout. {waited}. Did one skip a backward, or run the model, a loss "
            "or a checkpoint alone?"
        )

    def _failure(self) -> Failure | None:
        recorded = self._get("failure")
        return Failure(*json.loads(recorded)) if recorded else None

    def _heartbeats(self) -> list[str]:
        return [self._get(f"heartbeat/{rank}") for rank in range(self.num_ranks)]

    def _get(self, key: str) -> str:
        value = self._store.get(key).decode() if self._store.check([key]) else ""
        self.answered_at = time.monotonic()
        return value
