"""The output of a fuzzer's command line."""

import os
import signal
import sys
from collections.abc import Iterator
from random import Random

import pytest

from fuzz import loop


@pytest.fixture(autouse=True)
def handlers_of_before() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_prints_its_counts(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = iter(["good", "bad", "good", "interrupted"])

    def one_case(_: Random) -> str:
        case = next(cases)
        if case == "interrupted":
            os.kill(os.getpid(), number)
        if case == "bad":
            raise ValueError("it is bad")
        return case

    monkeypatch.setattr(sys, "argv", ["fuzz", "--seconds", "600", "--seed", "7"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what runs in the background
    assert loop.main(one_case, None) == 1
    out, err = capsys.readouterr()
    assert out == "3 cases: {'good': 2, 'failed': 1}\n"
    assert err == "seed 7, case 1: ValueError: it is bad\n"
