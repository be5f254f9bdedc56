"""Calls of functions in forks of the server that `rank_server` describes."""

import atexit
import os
import pickle
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from maxmoe.ranks.failures import RankError
from support import sent_functions
from support.programs import HangError, Program, abort

FILE = Path(__file__).with_name("rank_server.py")


def call_in_fork(function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """Call a function, which may be local, in a fork of the server; return its result, or raise its error.

    Several threads may call at the same time. After `seconds`, the server and all its forks end with their stacks.
    """
    __tracebackhide__ = True  # by pytest
    state = dict(os.environ), os.getcwd(), warnings.filters, patches()
    sent, modules = sent_functions.dumps((state, function, arguments))
    return server().call(sent, modules, seconds)


monkeypatches: list[pytest.MonkeyPatch] = []  # fixture of the running test, if it has one


def patches() -> list[tuple[Any, str, Any]]:
    """Return owner, name and value of each attribute that the fixture monkeypatch of the test has set."""
    changed = {(id(owner), name): owner for fixture in monkeypatches for owner, name, _ in fixture._setattr}
    return [(owner, name, getattr(owner, name)) for (_, name), owner in changed.items() if hasattr(owner, name)]


class Server:
    """A running server."""

    def __init__(self) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(FILE), str(theirs.fileno())]
            # NumPy's OpenBLAS starts threads when it is loaded, torch's OpenMP in large operators.
            environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            self.program = Program(command, env=environment, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    def call(self, sent: bytes, modules: list[str], seconds: float) -> Any:
        """Send a call, and wait for its result; `modules` are imported in the server."""
        __tracebackhide__ = True
        sys.stdout.flush()
        sys.stderr.flush()
        mine, theirs = socket.socketpair()
        with theirs, Connection(mine.detach()) as connection:
            try:
                socket.send_fds(self.requests, [pickle.dumps(modules)], [theirs.fileno(), 1, 2])
                theirs.close()
                connection.send_bytes(sent)
                if not connection.poll(seconds):
                    abort(self.program.mark)
                    self.program.process.wait()
                    text = f"a fork is still running after {seconds:g} s, see its stderr"
                    raise HangError(f"{text}\n{self.program.written()}")
                kind, result, text = connection.recv()
            except (EOFError, ConnectionError):
                raise RuntimeError(f"the fork or its server died\n{self.program.written()}") from None
        if kind == "refusal":
            self.close()
        if kind != "result":
            raise result from (None if isinstance(result, RankError) else RuntimeError(text))
        return result

    def close(self) -> None:
        """End the server and all its forks."""
        atexit.unregister(self.close)
        self.requests.close()
        self.program.close()


_servers: list[Server] = []
_starting = threading.Lock()


def server() -> Server:
    """Start the server of this process, or return it if it runs."""
    with _starting:
        if not _servers or _servers[-1].program.process.poll() is not None:
            _servers.append(Server())
        return _servers[-1]
