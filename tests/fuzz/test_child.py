"""Crashes, hangs and errors of a case are reported, and the next case gets a new process."""

import os
import time
from collections.abc import Callable
from random import Random

import pytest

from fuzz import child

GOOD, BAD = 2, 1  # seeds


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (lambda: os._exit(3), "^the process ended, exit code 3$"),
        (lambda: time.sleep(60), "^it took more than 1 s$"),
        (lambda: bytearray(2 * child.MEMORY), "^MemoryError: $"),
    ],
    ids=["ends", "sleeps", "takes memory"],
)
def test_a_hostile_case_fails(hostile: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_case(random: Random) -> str:
        if random.random() < 0.5:
            hostile()
        return f"{os.getpid()}"

    with child.Child(one_case) as run:
        process = run(Random(GOOD))
        assert process == run(Random(GOOD)) != f"{os.getpid()}"
        monkeypatch.setattr(child, "PATIENCE", 1)
        with pytest.raises(AssertionError, match=message):
            run(Random(BAD))
        monkeypatch.undo()
        assert run(Random(GOOD)) != process
