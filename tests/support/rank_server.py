"""The process that ranks of tests are forked from.

During a fork, the new process gets a copy of the calling thread only. A lock that another thread holds at that
moment, of malloc, of the resolver of glibc or of OpenMP, stays locked in the new process, which waits for it without
end. pytest has other threads: of operators, of pytest-xdist, of libraries that tests use. Therefore:

- pytest does not fork. The first call of `run_ranks` starts the server, as any program is started.
- The server is a new Python process. It imports torch, DTensor, FSDP2, maxmoe and the modules of tests whose
  functions it is asked to run, and computes nothing: it has one thread. For each call it forks a runner.
- The runner receives the function and its arguments, forks the ranks by `RankProcesses`, waits for them, and sends
  their results or the error to pytest.

A fork is safe because the server and the runner have one thread each, so that no other thread holds a lock. Both check
the number of threads before they fork. Forking takes a hundredth of the time of starting a process, which imports for
seconds.

A module of tests is imported in the server. It must do nothing there that starts a thread: no backward, whose engine
has threads for some devices; no import of `torch._inductor.lowering`, which starts a pool of compilers; no store or
process group of `torch.distributed`; no client of Jupyter; no library that starts threads when it is imported.
NumPy's OpenBLAS does, and ends its threads before a fork; the environment of the server disables them, so that any
second thread is an error. A server with other threads refuses to fork, and names the imported modules.

A rank has the environment, working folder, warning filters, stdout and stderr of the test, the attributes that its
fixture monkeypatch has set, and seed 0. Anything else must be set by the function that the rank runs.
"""

import gc
import importlib
import os
import pickle
import socket
import sys
import traceback
import types
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

# No module of maxmoe or of tests: pytest must first set the paths and the rewriting of asserts.
import pytest

ROOT = Path(__file__).parents[2]
MAX_BYTES = 2**16  # largest request, the names of modules


class _Requests:
    """Plugin that serves requests instead of running tests. pytest sets the paths, and asserts show their values."""

    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests

    def pytest_cmdline_main(self) -> int:
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
            _reap()


def _schedule() -> None:
    """Set the scheduling of the ranks, which inherit it."""
    # A thread that wakes up does not preempt the thread that wakes it. Gloo wakes its thread for messages while it
    # holds the lock that this thread needs, so that it would wait again at once.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # All ranks of a pytest-xdist process run on one processor: waking a rank on another processor takes longer than
    # most of their computations.
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})


def _reap() -> None:
    """Remove the runners that have ended from the table of processes."""
    with suppress(ChildProcessError):  # there are no runners
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prepare(modules: list[str]) -> str:
    """Import modules; return why the server must not fork, or ""."""
    from maxmoe.ranks.rank_processes import require_one_thread

    try:
        for module in modules:
            importlib.import_module(module)
        require_one_thread()
    except BaseException as error:
        return f"after importing {', '.join(modules)}: {_text(error)}"
    gc.freeze()  # a collection in a fork would write to the objects, and so copy their pages
    return ""


def _run(connection: Connection, stdout: int, stderr: int) -> NoReturn:
    """Run a call in this fork, and end it."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    try:
        connection.send_bytes(_answer(connection.recv_bytes()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(sent: bytes) -> bytes:
    """Call the function in the state of the test; return the result, or the error and its traceback."""
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
    del sys.path[0]  # this folder: its modules would hide others of the same name
    plugin = _Requests(socket.socket(fileno=int(sys.argv[1])))
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, str(ROOT / "tests")], plugins=[plugin]))
