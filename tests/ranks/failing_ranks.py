"""Ranks that die, hang or raise in the middle of a training, and the errors of all ranks."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from maxmoe.parallel import watch_ranks
from support.run_ranks import run_ranks

TIMEOUT, PATIENCE = 5.0, 3.0  # a busy machine delays collectives and heartbeats of living ranks, too
ENOUGH = 60.0  # for every collective on a busy machine
SLACK = 20.0  # on a busy machine; less than ENOUGH


_folders: list[Path] = []  # set by `outcomes` in the process of a rank


def note_time() -> None:
    """Write the time of a failure for `outcomes`."""
    for folder in _folders:
        (folder / "failed").write_text(str(time.monotonic()))


def die() -> None:
    note_time()
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    note_time()
    time.sleep(1000)


def complain() -> None:
    note_time()
    raise ValueError("no such token")


FAILURES = [
    (die, 0.0, f"rank 2 of 4 died or hangs: no heartbeat for {PATIENCE:g} s, last seen at /.* in .*"),
    (hang, TIMEOUT, r"rank 2 of 4 hangs at /.*/failing_ranks.py:\d+ in hang"),
    (complain, 0.0, "rank 2 of 4 failed first: ValueError: no such token"),
]


def outcomes(
    folder: Path, train: Callable[[], None], world_size: int = 4, timeout: float = ENOUGH, patience: float = PATIENCE
) -> dict[int, tuple[float, str]]:
    """Run a training loop on all ranks; return, by rank, its error and the seconds from the failure to the error.

    The failure is a call of `die`, `hang` or `complain`; without one the seconds are NaN.
    """
    with pytest.raises(RuntimeError, match="failed first"):
        run_ranks(watched, world_size, folder, train, patience, timeout=timeout)
    begin = float((folder / "failed").read_text()) if (folder / "failed").exists() else float("nan")
    lines = {int(path.name): path.read_text().partition(" ") for path in folder.glob("[0-9]*")}
    return {rank: (float(seconds) - begin, message) for rank, (seconds, _, message) in lines.items()}


def watched(folder: Path, train: Callable[[], None], patience: float) -> None:
    """Run a training loop on one rank, and write its error and the time of it for `outcomes`."""
    _folders.append(folder)
    try:
        with watch_ranks(patience):
            train()
    except Exception as error:
        note = f"{time.monotonic()} {type(error).__name__}: {error}"  # all processes have the same clock
        (folder / str(dist.get_rank())).write_text(note)
        raise


def patience_with(fail: Callable[[], None]) -> float:
    """Patience of `watch_ranks` in seconds. A rank that raises closes its connections only when its process ends."""
    return SLACK if fail is complain else PATIENCE


def check_rank_2_is_named(
    found: dict[int, tuple[float, str]], fail: Callable[[], None], delay: float, message: str
) -> None:
    """Every other rank of four names it in time; a rank that raises keeps its own error."""
    own = {2} if fail is complain else set()
    assert found.keys() == {0, 1, 3} | own
    for rank, (seconds, text) in found.items():
        expected = "ValueError: no such token" if rank in own else rf"RankError: {message} \(rank {rank} saw: .*\)"
        assert re.fullmatch(expected, text), text
        assert seconds < delay + PATIENCE + SLACK
