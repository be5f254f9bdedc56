"""One error that names the rank that failed first, where other ranks only see a closed connection or a timeout."""

import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from maxmoe._torch import default_store

T = TypeVar("T")

HEAD_START = 2.0  # seconds that the rank at fault ends before the others: torchrun takes the first for the cause
HEARTBEATS = 10  # per patience
LEFT = "left"  # in place of a heartbeat: the rank has left `watch_ranks` without an error
# Errors of gloo have no class of their own. Most begin with a file name of its sources.
GLOO_ERRORS = ("/gloo/", "Application timeout caused pair closure", "monitoredBarrier")

LIBRARY_FILES = rf"site-packages|^<|/lib/python3|^{re.escape(str(Path(__file__).parents[1]))}/"

_uses = itertools.count()


class RankError(RuntimeError):
    """Another rank died, hangs or has raised an error."""


@contextmanager
def watch_ranks(patience: float = 10.0) -> Iterator[None]:
    """Name the rank that fails first, on every rank.

    When a rank dies, hangs or raises, torch tells the others that a connection was closed or that a collective timed
    out. Around a training loop, `watch_ranks` finds the rank at fault and raises a `RankError` with its number and what
    is known of its failure. A rank that raises keeps its own error. A thread of each rank sends about ten heartbeats
    per `patience` through the store of torch.distributed; no collective is added.

    A rank that hangs is found `patience` seconds after the timeout of the collective that waits for it, see `Mesh`. It
    cannot be interrupted: its process prints its stack and exits with status 1. A rank that is still at work
    `patience` seconds after the failure of another one exits likewise. If the store does not answer for `patience`
    seconds, because its process is stopped, the error names that process.

    Args:
        patience: seconds without a heartbeat after which a rank counts as dead, and deadline in seconds for an answer
            of the store; torchrun waits 30 for all ranks.

    Yields:
        Nothing. With one rank, `watch_ranks` does nothing.

    Raises:
        RankError: if another rank failed first.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    records = Records(patience)
    watch = Watch(records)
    watch.start()
    try:
        yield
    except BaseException as error:
        if not is_lost_connection(error):
            watch.finish(partial(records.report, [records.rank], f"failed first: {type(error).__name__}: {error}"))
            raise
        with sigterm_ignored():
            place = place_of(list(traceback.walk_tb(error.__traceback__)))
            failure = watch.finish(partial(records.find_failure, place))
            if dist.is_torchelastic_launched():
                time.sleep(HEAD_START)
        raise RankError(f"{failure.message} (rank {records.rank} saw: {first_line(error)})") from None
    watch.finish(records.leave)


@contextmanager
def sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM, which torchrun sends to all ranks as soon as one has ended, while the failure is reported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def is_lost_connection(error: BaseException | None) -> bool:
    """Tell whether an error, or a cause of it, is torch's error for a lost connection or a timeout."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in GLOO_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False


def place_of(lines: list[tuple[FrameType, int]]) -> str:
    """Return the innermost line that is neither in a library nor in this package.

    Args:
        lines: frames and their line numbers, the outermost first. In a traceback, the line number of an entry is not
            that of its frame: a frame that handles the error, as a `with` statement does, has moved on.
    """
    own = [line for line in lines if not re.search(LIBRARY_FILES, line[0].f_code.co_filename)]
    frame, line_number = (own or lines)[-1]
    return f"{frame.f_code.co_filename}:{line_number} in {frame.f_code.co_name}"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, without the file name that gloo puts before it."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[/\S*/gloo/\S*\] ", "", lines[0])


class Failure(NamedTuple):
    """The failure that all ranks report.

    Attributes:
        ranks: the ranks at fault; empty if they are not known.
        message: names them.
    """

    ranks: list[int]
    message: str


STORE_IS_GONE = Failure([], "the process with the store of torch.distributed died: rank 0, or torchrun")


class Records:
    """Heartbeats and the failure of all ranks, in the store of torch.distributed.

    Methods that read the store can block without a deadline: `Watch` calls them.

    Args:
        patience: see `watch_ranks`.
    """

    def __init__(self, patience: float) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.patience = patience
        self.answered_at = -float("inf")  # time of the last answer of the store
        self.store: Any = default_store()
        self._prefix = f"maxmoe.watch_ranks/{next(_uses)}"

    def connect(self) -> None:
        """Open a connection for this rank's records: on torch's, a group that is being made may wait for ranks."""
        self.store = PrefixStore(self._prefix, self.store.clone())

    def send_heartbeat(self, count: int, place: str) -> None:
        """Write a heartbeat: a number that differs from the last one, and the line at which the rank is."""
        self.store.set(f"heartbeat/{self.rank}", f"{count} {place}")

    def leave(self) -> None:
        """Record that this rank has ended without an error and sends no more heartbeats."""
        self.store.set(f"heartbeat/{self.rank}", LEFT)

    def report(self, ranks: list[int], what: str) -> Failure:
        """Record the failure of ranks, unless another failure is recorded; return the recorded one."""
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"
        failure = json.dumps(Failure(ranks, f"{names} of {self.num_ranks} {what}"))
        return Failure(*json.loads(self.store.compare_set("failure", "", failure)))

    def failure(self) -> Failure | None:
        """Return the recorded failure."""
        recorded = self._get("failure")
        return Failure(*json.loads(recorded)) if recorded else None

    def find_failure(self, place: str) -> Failure:
        """Return the recorded failure, or find the ranks at fault if none is recorded within the patience.

        Args:
            place: the line at which this rank has lost the others.
        """
        self.store.set(f"lost/{self.rank}", place)
        before, end = self._heartbeats(), time.monotonic() + self.patience
        while time.monotonic() < end:
            if failure := self.failure():
                return failure
            time.sleep(self.patience / HEARTBEATS)
        return self.report(*self._ranks_at_fault(before, self._heartbeats()))

    def silent_store(self) -> Failure:
        """Return the failure of a store that has not answered within the patience."""
        message = f"the process with the store of torch.distributed gives no sign of life for {self.patience:g} s"
        store = self.store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
            message += ": torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else ": rank 0"
        return Failure([], message)

    def _ranks_at_fault(self, before: list[str], now: list[str]) -> tuple[list[int], str]:
        """Return the ranks that have not recorded a lost connection, and what they do instead."""
        at_work = [rank for rank in range(self.num_ranks) if now[rank] != LEFT and not self._get(f"lost/{rank}")]
        places = {rank: now[rank].partition(" ")[2] for rank in at_work}
        dead = [rank for rank in at_work if now[rank] == before[rank]]
        if dead:
            last = ", ".join(places[rank] or "the start" for rank in dead)
            return dead, f"died or hangs: no sign of life for {self.patience:g} s, last seen at {last}"
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

    def _heartbeats(self) -> list[str]:
        return [self._get(f"heartbeat/{rank}") for rank in range(self.num_ranks)]

    def _get(self, key: str) -> str:
        value = self.store.get(key).decode() if self.store.check([key]) else ""
        self.answered_at = time.monotonic()
        return value


class Watch(threading.Thread):
    """Thread that sends heartbeats, and ends the process if it does not notice the failure of another rank.

    It makes all calls on the store, so that the watched thread can give up on them. `TCPStore.set_timeout` is no
    deadline: while the process with the store is stopped, its sockets are open and the calls wait.

    Args:
        records: of all ranks.
    """

    def __init__(self, records: Records) -> None:
        super().__init__(name="maxmoe.watch_ranks", daemon=True)
        self.records = records
        self.watched = threading.get_ident()
        self.stopped = threading.Event()
        self.last_call: Callable[[], Any] = records.leave
        self.result: Any = STORE_IS_GONE

    def run(self) -> None:
        """Send heartbeats until `finish`, then make its call."""
        with suppress(dist.DistError):  # the process with the store is gone
            self.records.connect()
            self._send_heartbeats()
            self.result = self.last_call()

    def finish(self, last_call: Callable[[], T]) -> T | Failure:
        """Stop the heartbeats and make a last call on the store.

        Returns:
            What the call returns, or the failure of the store if it does not answer within the patience.
        """
        self.last_call = last_call
        self.stopped.set()
        begin, patience = time.monotonic(), self.records.patience
        while self.is_alive():
            left = max(begin, self.records.answered_at) + patience - time.monotonic()
            if left < 0:
                return self.records.silent_store()
            self.join(left)
        return self.result  # type: ignore[no-any-return]

    def _send_heartbeats(self) -> None:
        failed_at = None
        for count in itertools.count():
            self.records.send_heartbeat(count, self._place())
            if failure := self.records.failure():
                failed_at = failed_at or time.monotonic()
                if self.records.rank in failure.ranks or time.monotonic() > failed_at + self.records.patience:
                    self._exit(failure)
            if self.stopped.wait(self.records.patience / HEARTBEATS):
                return

    def _place(self) -> str:
        return place_of([*traceback.walk_stack(sys._current_frames()[self.watched])][::-1])

    def _exit(self, failure: Failure) -> None:
        """End the process: the watched thread may be in a call that nothing interrupts."""
        message = failure.message
        if self.records.rank in failure.ranks:
            message += "\n" + "".join(traceback.format_stack(sys._current_frames()[self.watched]))
        try:
            raise RankError(message)
        except RankError as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            get_error_handler().record_exception(error)  # for torchrun
        os._exit(1)
