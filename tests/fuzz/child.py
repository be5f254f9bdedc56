"""Runs cases in a process of its own, for what may end the process or never return."""

import multiprocessing
import os
import resource
import signal
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import torch

from fuzz.loop import Case

PATIENCE = 60  # seconds for one case, on a busy machine
MEMORY = 2**30  # bytes for all cases of a process


def work(ours: Connection, theirs: Connection, one_case: Case) -> None:
    """Run the cases that come, each in an empty folder, and send what came of it and what failed."""
    ours.close()  # so that this process ends with the other one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other one
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY, virtual + MEMORY))
    with suppress(EOFError):
        while True:
            folder, random = theirs.recv()
            os.chdir(folder)
            try:
                theirs.send((one_case(random), None))
            except BaseException as error:
                theirs.send(("", f"{type(error).__name__}: {error}"))


class Child:
    """Runs cases in another process; after one that fails the next gets a new one.

    Args:
        one_case: may change its working directory as it likes.
    """

    def __init__(self, one_case: Case) -> None:
        self.one_case = one_case

    def __enter__(self) -> "Child":
        torch.set_num_threads(1)  # those of OpenMP are not forked
        self.connection, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=work, args=(self.connection, theirs, self.one_case))
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
        """Wait for what came of the case, and what failed."""
        if not self.connection.poll(PATIENCE):
            return "", f"it took more than {PATIENCE} s"
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            return "", f"the process ended, exit code {self.process.exitcode}"
