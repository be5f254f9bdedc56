"""Programs, started as a user starts them. A program that hangs ends with the stacks of all its processes."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MAX_SECONDS = 300.0  # on a busy machine


@contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    """Start a program, give a function that may send it a signal and waits for its end, and end all its processes."""
    # A variable of the environment marks all its processes: torchrun starts each rank in a new session.
    mark = f"MAXMOE_TEST_{uuid.uuid4().hex}"
    environment = {**(os.environ if env is None else env), mark: "1", "PYTHONFAULTHANDLER": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    process = subprocess.Popen(command, env=environment, errors="replace", start_new_session=True, **options)

    def finish(number: int | None = None, seconds: float = MAX_SECONDS) -> "subprocess.CompletedProcess[str]":
        if number is not None:
            process.send_signal(number)
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            write_stacks(mark)
            output, errors = process.communicate()
            name = subprocess.list2cmdline(command)[:300]
            raise AssertionError(f"still running after {seconds:g} s: {name}\n{output}\n{errors}") from None
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    try:
        yield finish
    finally:
        while running := processes(mark):
            send(running, signal.SIGKILL)
            process.poll()
            time.sleep(0.01)
        process.communicate()


def run(command: Sequence[str], seconds: float = MAX_SECONDS, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, with options of `subprocess.Popen`."""
    with started(command, **options) as finish:
        return finish(seconds=seconds)


def python(code: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run code in a new Python."""
    return run([sys.executable, "-c", code, *arguments], **options)


def printed(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the output of a program that must have succeeded."""
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def write_stacks(mark: str) -> None:
    """Abort processes, which then write their stacks: one after the other, while the others are stopped.

    torchrun would end its ranks when the first of them has ended.
    """
    send(processes(mark), signal.SIGSTOP)
    for process in processes(mark):
        send([process], signal.SIGABRT, signal.SIGCONT)
        wait_until(lambda process=process: process not in processes(mark))  # type: ignore[misc]


def send(numbers: Sequence[int], *signals: int) -> None:
    """Send signals to processes that may have ended."""
    for process in numbers:
        for number in signals:
            with suppress(ProcessLookupError):
                os.kill(process, number)


def processes(mark: str) -> list[int]:
    """Return the running processes with a mark, children before their parents, since some end with their parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of a process that has ended
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return sorted(found, reverse=True)
