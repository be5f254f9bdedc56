"""Runs cases in another process, because a case may crash or hang it."""

import multiprocessing
import os
import resource
import signal
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from fuzz.loop import Case
from support.run_ranks import ByValue, start_server

PATIENCE = 60  # seconds for one case, on a busy machine
MEMORY = 2**30  # bytes for all cases of a process


def work(connection: Connection, one_case: Case) -> None:
    """Run the received cases, each in an empty folder, and send its result and its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the other process
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY, virtual + MEMORY))
    with suppress(EOFError):
        while True:
            folder, random = connection.recv()
            os.chdir(folder)
            try:
                connection.send((one_case(random), None))
            except BaseException as error:
                connection.send(("", f"{type(error).__name__}: {error}"))


class Child:
    """Runs cases in another process; after one that fails the next gets a new one.

    Args:
        one_case: may change its working directory as it likes.
    """

    def __init__(self, one_case: Case) -> None:
        self.one_case = ByValue(one_case)

    def __enter__(self) -> "Child":
        self.connection, theirs = multiprocessing.Pipe()
        start_server()
        self.process = multiprocessing.get_context("forkserver").Process(target=work, args=(theirs, self.one_case))
        self.process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def __call__(self, random: Random) -> str:
        """Run one case."""
        with tempfile.TemporaryDirectory() as folder:
            self.connection.send((folder, random))
            outcome, failure = self.answer()
            if failure is not None:
                self.__exit__()
                self.__enter__()
                raise AssertionError(failure)
        return outcome

    def answer(self) -> tuple[str, str | None]:
        """Wait for the result and the error of the case."""
        if not self.connection.poll(PATIENCE):
            return "", f"it took more than {PATIENCE} s"
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            return "", f"the process ended, exit code {self.process.exitcode}"
