"""Programs, started as a user starts them. A program that hangs ends with the stacks of all its processes.

A program has a bound in seconds. When it has passed, the program and all processes that it has started are aborted:
each Python process writes the stacks of its threads to stderr (PYTHONFAULTHANDLER), which the error shows.
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
SECONDS = 5.0  # for the stacks of processes and their end
# Environment variable with the marks of a process. Sessions or process groups would not do: torchrun starts each rank
# in a new one.
MARKS = "MAXMOE_TEST_MARKS"


class HangError(AssertionError):
    """Error for a program, a call or a test that has not ended in time."""


class Program:
    """A running program. Leaving the context kills it and all processes that it has started.

    Args:
        command: program and arguments.
        seconds: time after which the program hangs.
        cwd: working folder, this one if None.
        env: environment, this one if None.
        **options: of `subprocess.Popen`. By default, stdout and stderr are files, which never fill up as pipes do.
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
        self.last = time.monotonic() + seconds
        self.stdout, self.stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        environment = dict(os.environ if env is None else env)
        self.mark = add_mark(environment)
        files: dict[str, Any] = {"stdout": self.stdout, "stderr": self.stderr} | options
        self.process = subprocess.Popen(self.command, cwd=cwd, env=environment, start_new_session=True, **files)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the program and all processes that it has started."""
        end(self.mark, signal.SIGKILL)
        self.process.wait()
        self.stdout.close()
        self.stderr.close()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; raise if the program ends before it does."""
        while not condition():
            if self.process.poll() is not None:
                assert condition(), f"{self} has ended with status {self.process.returncode}\n{self.written()}"
            if time.monotonic() > self.last:
                self.abort()
            time.sleep(0.01)

    def wait(self) -> "subprocess.CompletedProcess[str]":
        """Wait until the program ends; return its exit status and its output."""
        try:
            self.process.wait(max(0.0, self.last - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.abort()
        output, errors = _text(self.stdout), _text(self.stderr)
        return subprocess.CompletedProcess(self.command, self.process.returncode, output, errors)

    def abort(self) -> None:
        """End all processes with their stacks, and raise an error that shows them."""
        abort(self.mark)
        self.process.wait()
        raise HangError(f"still running after {self.seconds:g} s: {self}\n{self.written()}")

    def written(self) -> str:
        """Return the output of the processes so far."""
        return f"stdout:\n{_text(self.stdout)}\nstderr:\n{_text(self.stderr)}"

    def __str__(self) -> str:
        return subprocess.list2cmdline(self.command)[:300]


def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, with options of `Program`."""
    with Program(command, **options) as program:
        return program.wait()


def python(code: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run code in a new Python, with options of `Program`."""
    return run([sys.executable, "-c", code, *arguments], **options)


def printed(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the output of a program that must have succeeded."""
    assert done.returncode == 0, done.stderr
    return done.stdout


# Processes, found by a mark in the environment that they were started with


def add_mark(environment: dict[str, str] | os._Environ[str]) -> str:
    """Mark all processes that will be started with an environment; return the mark."""
    mark = uuid.uuid4().hex
    environment["PYTHONFAULTHANDLER"] = "1"
    environment[MARKS] = f"{environment.get(MARKS, '')} {mark}"
    return mark


def abort(mark: str) -> None:
    """End processes with their stacks, one after the other, so that no two write at the same time.

    The others are stopped meanwhile: torchrun would end its ranks when the first of them has ended.
    """
    send(processes(mark), signal.SIGSTOP)
    for process in processes(mark):
        send([process], signal.SIGABRT)
        send([process], signal.SIGCONT)
        wait_for_end(mark, process)
    end(mark, signal.SIGKILL)


def end(mark: str, number: int) -> None:
    """Send a signal to all processes, and wait some seconds for their end."""
    send(processes(mark), number)
    wait_for_end(mark)


def send(numbers: Sequence[int], number: int) -> None:
    """Send a signal to processes that may have ended."""
    for process in numbers:
        with suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_CORE, (0, 0))
            os.kill(process, number)


def wait_for_end(mark: str, process: int | None = None) -> None:
    """Wait some seconds for the end of one process with a mark, or of all."""
    last = time.monotonic() + SECONDS
    while time.monotonic() < last:
        running = processes(mark)
        if not running or (process is not None and process not in running):
            return
        time.sleep(0.01)


def processes(mark: str) -> list[int]:
    """Return the running processes with a mark, children before their parents, since some end with their parent.

    A process that waits to be reaped has no environment.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return sorted(found, reverse=True)


def _text(file: IO[bytes]) -> str:
    descriptor = file.fileno()  # shares its offset with the processes, which may still write
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
