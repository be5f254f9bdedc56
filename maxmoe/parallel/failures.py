"""Which rank failed first: one error that names it, where other ranks only see a closed connection or a timeout."""

import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

HEAD_START = 2.0  # seconds that the rank at fault ends before the others: torchrun takes the first for the cause
BEATS = 10  # signs of life within the patience
LEFT = "left"
# Its errors have no class of their own. Most begin with a place in its sources.
OF_GLOO = ("/gloo/", "Application timeout caused pair closure", "monitoredBarrier")

OF_LIBRARIES = rf"site-packages|^<|/lib/python3|^{re.escape(str(Path(__file__).parents[1]))}/"

_uses = itertools.count()


class RankError(RuntimeError):
    """Another rank died, hangs or has raised an error."""


@contextmanager
def watch_ranks(patience: float = 10.0) -> Iterator[None]:
    """Name the rank that fails first, on every rank.

    When a rank dies, hangs or raises, torch tells the others that a connection was closed or that a collective timed
    out. Around a training loop this finds the rank at fault and raises a `RankError` with its number and what is known
    of it. A rank that raises keeps its own error. The ranks exchange signs of life through the store of
    torch.distributed, about ten in `patience`, from a thread; no collective is added.

    A rank that hangs is known `patience` seconds after the timeout of the collective that waits for it, see `Mesh`. It
    cannot be interrupted: its process prints its stack and exits with status 1. So does one that is still at work
    `patience` seconds after another one has failed.

    Args:
        patience: seconds without a sign of life after which a rank counts as dead; torchrun waits 30 for all ranks.

    Yields:
        Nothing; without other ranks, it does nothing either.

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
            watch.stop()  # it would end the process of a rank on record
            records.accuse([records.rank], f"failed first: {type(error).__name__}: {error}")
            raise
        with sigterm_ignored():
            failure = records.find(place_of([frame for frame, _ in traceback.walk_tb(error.__traceback__)]))
            watch.stop()
            if dist.is_torchelastic_launched():
                time.sleep(HEAD_START)
        raise RankError(f"{failure.message} (rank {records.rank} saw: {first_line(error)})") from None
    watch.stop()
    records.leave()


@contextmanager
def sigterm_ignored() -> Iterator[None]:
    """Leave the time to tell what happened: torchrun sends SIGTERM to all ranks as soon as one has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def is_lost_connection(error: BaseException | None) -> bool:
    """Tell whether an error is what torch says of ranks that are gone or do not come, or comes from one."""
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in OF_GLOO):
            return True
        error = error.__cause__ or error.__context__
    return False


def place_of(frames: list[FrameType]) -> str:
    """Return the innermost place that is neither of a library nor of this package; the first frame is the outermost."""
    own = [frame for frame in frames if not re.search(OF_LIBRARIES, frame.f_code.co_filename)]
    frame = (own or frames)[-1]
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def first_line(error: BaseException) -> str:
    """Return what an error says, without torch's place in its sources and without advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[/\S*/gloo/\S*\] ", "", lines[0])


class Failure(NamedTuple):
    """Of ranks, as all ranks know it.

    Attributes:
        ranks: at fault; none if it is not known.
        message: names them.
    """

    ranks: list[int]
    message: str


STORE_IS_GONE = Failure([], "the process with the store of torch.distributed died: rank 0, or torchrun")


class Records:
    """What the ranks tell each other, through the store of torch.distributed.

    Args:
        patience: see `watch_ranks`.
    """

    def __init__(self, patience: float) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.patience = patience
        # A connection of its own: on torch's, a group that is being made may wait for other ranks.
        store: Any = dist.distributed_c10d._get_default_store()
        self.store = dist.distributed_c10d.PrefixStore(f"maxmoe.watch_ranks/{next(_uses)}", store.clone())

    def beat(self, count: int, place: str) -> None:
        """Give a sign of life: a number that no other one has, and where the rank is."""
        self.store.set(f"alive/{self.rank}", f"{count} {place}")

    def leave(self) -> None:
        """Say that no more signs of life will come."""
        with suppress(dist.DistError):  # the process with the store may have come to its end
            self.store.set(f"alive/{self.rank}", LEFT)

    def accuse(self, ranks: list[int], what: str) -> Failure:
        """Record the failure of ranks, unless another one is on record; return that which is."""
        names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"
        failure = json.dumps(Failure(ranks, f"{names} of {self.num_ranks} {what}"))
        try:
            return Failure(*json.loads(self.store.compare_set("failure", "", failure)))
        except dist.DistError:
            return STORE_IS_GONE

    def failure(self) -> Failure | None:
        """Return the failure on record."""
        recorded = self._get("failure")
        return Failure(*json.loads(recorded)) if recorded else None

    def find(self, place: str) -> Failure:
        """Return the failure on record, or find the ranks at fault after waiting for one.

        Args:
            place: where this rank has lost the others.

        Returns:
            The failure.
        """
        try:
            self.store.set(f"lost/{self.rank}", place)
            before, end = self._signs(), time.monotonic() + self.patience
            while time.monotonic() < end:
                if failure := self.failure():
                    return failure
                time.sleep(self.patience / BEATS)
            return self.accuse(*self._suspects(before, self._signs()))
        except dist.DistError:
            return STORE_IS_GONE

    def _suspects(self, before: list[str], now: list[str]) -> tuple[list[int], str]:
        """Find who is at fault: other ranks lose connections, or wait until a timeout."""
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

    def _signs(self) -> list[str]:
        return [self._get(f"alive/{rank}") for rank in range(self.num_ranks)]

    def _get(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


class Watch(threading.Thread):
    """Gives signs of life of a thread, and ends the process if it does not notice the failure of another rank.

    Args:
        records: of all ranks.
    """

    def __init__(self, records: Records) -> None:
        super().__init__(name="maxmoe.watch_ranks", daemon=True)
        self.records = records
        self.watched = threading.get_ident()
        self.stopped = threading.Event()

    def run(self) -> None:
        """See `threading.Thread`."""
        failed_at = None
        try:
            for count in itertools.count():
                self.records.beat(count, self._place())
                failure = self.records.failure()
                if failure:
                    failed_at = failed_at or time.monotonic()
                    if self.records.rank in failure.ranks or time.monotonic() > failed_at + self.records.patience:
                        self._exit(failure)
                if self.stopped.wait(self.records.patience / BEATS):
                    return
        except dist.DistError:  # the process with the store is gone, and connections to it
            return

    def stop(self) -> None:
        """Stop the thread."""
        self.stopped.set()
        self.join(self.records.patience)

    def _place(self) -> str:
        frames = traceback.walk_stack(sys._current_frames()[self.watched])
        return place_of([frame for frame, _ in frames][::-1])

    def _exit(self, failure: Failure) -> None:
        """End the process, whose other thread can be in a call that nothing interrupts."""
        message = failure.message
        if self.records.rank in failure.ranks:
            message += "\n" + "".join(traceback.format_stack(sys._current_frames()[self.watched]))
        try:
            raise RankError(message)
        except RankError as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            get_error_handler().record_exception(error)  # for torchrun
        os._exit(1)
