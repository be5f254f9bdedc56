"""The process that ranks of tests are forked from.

A fork copies the thread that forks, and no other. A lock that another thread holds at that moment, of malloc, of the
resolver of glibc, of OpenMP, stays locked in the new process, which waits for it for ever if it needs it. pytest has
threads: those of operators, of pytest-xdist, of whatever a test starts. So what is forked from what?

    pytest      starts, as any program is started, with the first call of `run_ranks`
    the server  a Python of its own, which has imported torch, DTensor, FSDP2, maxmoe and, as they come, the modules of
                tests, and has computed nothing. It has one thread, and asks before it forks, for each call,
    a runner    which gets the function and its arguments, forks
    the ranks   as `RankProcesses` does, waits for them, and sends their results or the error to pytest.

Nobody forks that has more than one thread; no lock is held but by who forks. Forking takes a hundredth of the time of
starting: the ranks have torch and everything else already.

What a module of tests does when it is imported, the server does. Never there: a backward, which may start the threads of
the autograd engine; an operator of torch on several threads; a store or process group of `torch.distributed`; clients of
Jupyter; anything else with a thread. A server with threads does not fork, and says which module brought them.

Every rank has the environment, the folder, the warning filters, stdout and stderr of the test, what its fixture monkeypatch
has patched, and seed 0. Other patches a function makes in the rank.
"""

import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
import types
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

# Not maxmoe or anything of tests: pytest must come first, which sets the paths and rewrites asserts.
import pytest

ROOT = Path(__file__).parents[2]
MAX_BYTES = 2**16  # of the names of modules


class _Requests:
    """A plugin of pytest, which gives the server its paths and the asserts that show their values, and runs no tests."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests

    def pytest_cmdline_main(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the runners, and pytest this process
        sys.modules.setdefault("tests", types.ModuleType("tests")).__path__ = [str(ROOT / "tests")]
        importlib.import_module("support.run_ranks")
        gc.set_threshold(100_000, 10, 10)
        gc.collect()
        _schedule()
        while True:
            message, files, *_ = socket.recv_fds(self.requests, MAX_BYTES, 3)
            if not message:
                return 0
            refusal = _prepare(pickle.loads(message))
            connection = Connection(files[0])
            if refusal:
                connection.recv_bytes()
                connection.send(("refusal", RuntimeError(refusal), ""))
            elif os.fork() == 0:
                _run(connection, *files[1:])
            connection.close()
            for file in files[1:]:
                os.close(file)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # runners that have ended
                    pass


def _schedule() -> None:
    """Let ranks wake each other fast."""
    # A thread that wakes up does not interrupt the one that wakes it. Gloo wakes its thread for messages while it holds
    # the lock that this thread needs, which would ask for it again and again.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # All ranks of a process of pytest-xdist on one processor: to wake a rank on another takes longer than what most of
    # them do with the message.
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})


def _prepare(modules: list[str]) -> str:
    """Import modules; return why the server must not fork, or ""."""
    from maxmoe.testing.rank_processes import require_one_thread

    try:
        for module in modules:
            importlib.import_module(module)
        require_one_thread()
    except BaseException as error:
        return f"after importing {', '.join(modules)}: {_text(error)}"
    gc.freeze()  # what is there before a fork is not looked at in it, which would copy its pages
    return ""


def _run(connection: Connection, stdout: int, stderr: int) -> NoReturn:
    """What a runner does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    try:
        connection.send_bytes(_answer(connection.recv_bytes()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(sent: bytes) -> bytes:
    """Call the function with the state of the test; return the result, or the error and its traceback."""
    try:
        (environment, folder, filters, patches), function, arguments = pickle.loads(sent)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        warnings.resetwarnings()
        warnings.filters.extend(filters)
        for owner, name, value in patches:
            setattr(owner, name, value)
        return pickle.dumps(("result", function(*arguments), ""))
    except BaseException as error:
        return pickle.dumps(("error", error, _text(error)))


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules have names of others
    plugin = _Requests(socket.socket(fileno=int(sys.argv[1])))
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, str(ROOT / "tests")], plugins=[plugin]))
