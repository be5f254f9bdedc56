"""The process that ranks are forked from: one thread, and the state of the test in its forks."""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from maxmoe import config
from support import sent_functions
from support.call_in_fork import call_in_fork, server
from support.programs import HangError


def in_fork(function: Any, *arguments: Any, seconds: float = 60.0) -> Any:
    return call_in_fork(function, *arguments, seconds=seconds)


def test_the_server_has_one_thread_and_what_ranks_need() -> None:
    def look() -> tuple[int, set[str]]:
        return len(os.listdir(f"/proc/{os.getppid()}/task")), {*sys.modules}

    num_threads, modules = in_fork(look)
    assert num_threads == 1
    assert modules >= {"torch.distributed.fsdp", "torch.distributed.tensor", "maxmoe.sharding", "support.run_ranks"}
    assert not {"zmq", "IPython", "torch._inductor.compile_fx"} & modules


@pytest.mark.slow  # starts a server
def test_a_server_with_threads_does_not_fork() -> None:
    """The server raises an error, and is replaced."""
    sent, _ = sent_functions.dumps(None)
    with pytest.raises(RuntimeError, match=r"(?s)support.starts_a_thread.*must have one thread, got 2"):
        server().call(sent, ["support.starts_a_thread"], 60.0)
    assert in_fork(abs, -3) == 3


def test_a_fork_has_the_state_of_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NAME", "value")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "SOMETHING", lambda: [tmp_path], raising=False)

    def look() -> tuple[Any, ...]:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        with pytest.raises(UserWarning, match="as an error"):
            warnings.warn("as an error", stacklevel=1)
        return os.environ["NAME"], os.environ.get("HOME"), Path.cwd(), config.SOMETHING()  # type: ignore[attr-defined]

    assert in_fork(look) == ("value", None, tmp_path, [tmp_path])
    assert capfd.readouterr() == ("to stdout\n", "to stderr\n")


def test_asserts_show_their_values() -> None:
    def check() -> None:
        assert len(summands) == 3

    summands = torch.ones(2)
    with pytest.raises(AssertionError, match=r"(?s)assert 2 == 3\n \+  where 2 = len\(tensor\(\[1\., 1\.\]\)\)"):
        in_fork(check)


def test_a_call_that_hangs_ends_with_its_stack(capfd: pytest.CaptureFixture[str]) -> None:
    def hang_in_fork() -> None:
        time.sleep(1000)

    in_fork(abs, -3)
    with pytest.raises(HangError, match=r"still running after 2 s"):
        in_fork(hang_in_fork, seconds=2.0)
    assert "in hang_in_fork\n" in capfd.readouterr().err
    assert in_fork(abs, -3) == 3


def test_a_fork_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the fork or its server died"):
        in_fork(os._exit, 3)
    assert in_fork(abs, -3) == 3
