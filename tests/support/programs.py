"""Programs, started as a user starts them. A wait for one has an end that says where it and its processes hang.

Every program has a bound, in seconds. When it has passed, all its processes are aborted, those that it has started among
them: each Python writes the stacks of its threads to its stderr (PYTHONFAULTHANDLER), and the error has what was written.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MAX_SECONDS = 300.0  # on a busy machine
SECONDS_FOR_STACKS = 5.0
# In the environment of a program and of all that it starts, in whatever session: torchrun puts its ranks into new ones.
MARKS = "MAXMOE_TEST_MARKS"


class Hangs(AssertionError):
    """Something did not end in time."""


class Program:
    """A program that runs. Leaving the context kills it and all that it has started.

    Args:
        command: the program and its arguments.
        seconds: how long it may take.
        cwd: folder to start it in.
        env: its environment, this one if None.
        **options: of `subprocess.Popen`. By default, what it writes goes to files, which never fill up as pipes do.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        seconds: float = MAX_SECONDS,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.command, self.seconds = list(command), seconds
        self.end = time.monotonic() + seconds
        self.stdout, self.stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        environment = dict(os.environ if env is None else env)
        self.mark = add_mark(environment)
        files: dict[str, Any] = {"stdout": self.stdout, "stderr": self.stderr} | options
        self.process = subprocess.Popen(self.command, cwd=cwd, env=environment, start_new_session=True, **files)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes."""
        send_signal(self.mark, signal.SIGKILL)
        self.process.wait()
        self.stdout.close()
        self.stderr.close()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; an error if the program ends before."""
        while not condition():
            if self.process.poll() is not None:
                assert condition(), f"{self} has ended with status {self.process.returncode}\n{self.written()}"
            if time.monotonic() > self.end:
                self.abort()
            time.sleep(0.01)

    def wait(self) -> "subprocess.CompletedProcess[str]":
        """Wait until it ends; return its exit status and what it wrote."""
        try:
            self.process.wait(max(0.0, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.abort()
        output, errors = _text(self.stdout), _text(self.stderr)
        return subprocess.CompletedProcess(self.command, self.process.returncode, output, errors)

    def abort(self) -> None:
        """End all processes with their stacks, and raise an error that has them."""
        abort(self.mark)
        self.process.wait()
        raise Hangs(f"still running after {self.seconds:g} s: {self}\n{self.written()}")

    def written(self) -> str:
        """What its processes have written."""
        return f"stdout:\n{_text(self.stdout)}\nstderr:\n{_text(self.stderr)}"

    def __str__(self) -> str:
        return subprocess.list2cmdline(self.command)[:300]


def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end; `options` are those of `Program`."""
    with Program(command, **options) as program:
        return program.wait()


def python(code: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run code in a new Python; `options` are those of `Program`."""
    return run([sys.executable, "-c", code, *arguments], **options)


def printed(done: "subprocess.CompletedProcess[str]") -> str:
    """What a program that has succeeded has printed."""
    assert done.returncode == 0, done.stderr
    return done.stdout


# Processes by the marks in the environment that they were started with


def add_mark(environment: dict[str, str] | os._Environ[str]) -> str:
    """Mark all processes that are started with an environment; return the mark."""
    mark = uuid.uuid4().hex
    environment["PYTHONFAULTHANDLER"] = "1"
    environment[MARKS] = f"{environment.get(MARKS, '')} {mark}"
    return mark


def abort(mark: str) -> None:
    """End processes with their stacks."""
    send_signal(mark, signal.SIGABRT)
    end = time.monotonic() + SECONDS_FOR_STACKS
    while processes(mark) and time.monotonic() < end:
        time.sleep(0.05)
    send_signal(mark, signal.SIGKILL)


def send_signal(mark: str, number: int) -> None:
    for process in processes(mark):
        with suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process, resource.RLIMIT_CORE, (0, 0))
            os.kill(process, number)


def processes(mark: str) -> list[int]:
    """Return those that run; the environment of one that waits to be reaped is empty."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def _text(file: IO[bytes]) -> str:
    descriptor = file.fileno()  # the offset is that of the processes, which may still write
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
