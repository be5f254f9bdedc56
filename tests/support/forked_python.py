"""Python processes that are forked from this one, which has torch and maxmoe already.

A new interpreter takes 1.5 to 4 s to import them. What is new in a fork: the program and its module `__main__`, the
modules of tests and examples, environment, folder, `sys.path`, signals, warnings and open files.
"""

import asyncio
import faulthandler
import gc
import inspect
import os
import runpy
import signal
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

ROOT = Path(__file__).parents[2]
SUBPROCESSES_OF_TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
# Modules of tests and examples, and one that reads the environment when it is imported.
FRESH = (str(ROOT / "tests") + os.sep, str(ROOT / "examples") + os.sep, f"{os.sep}matplotlib{os.sep}")
# A program that hangs ends with the stacks of its threads, earlier than the program that has started it, which reports
# what it wrote.
MAX_SECONDS = 600.0
EARLIER_SECONDS = 30.0


class ForkedPython(subprocess.Popen[Any]):
    """A `Popen` of `[sys.executable, "-c" code | "-m" module | script, *arguments]` that forks and starts no Python.

    Other commands are started as usual.
    """

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        if given["args"][0] != sys.executable:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        sys.stdout.flush()
        sys.stderr.flush()
        max_seconds = (signal.getitimer(signal.ITIMER_REAL)[0] or MAX_SECONDS + EARLIER_SECONDS) - EARLIER_SECONDS
        ready, is_new = os.pipe()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _main(given, [ends[0], ends[3], ends[5]], [ends[1], ends[2], ends[4], ready], is_new, max_seconds)
        os.close(is_new)
        os.read(ready, 1)  # of nothing, when the fork has its session
        os.close(ready)
        self._child_created = True
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


def run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None, **options: Any) -> Any:
    """`subprocess.run` with captured texts, in a fork."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with ForkedPython(command, text=True, cwd=cwd, env=env, **pipes) as process:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _main(given: dict[str, Any], files: list[int], others: list[int], is_new: int, max_seconds: float) -> NoReturn:
    """What a fork does; `os._exit` skips what pytest does at its end."""
    code = 1
    try:
        torch.set_num_threads(1)  # first of all: the threads of OpenMP are not forked
        gc.freeze()
        _become_new(given, files, others)
        os.close(is_new)
        faulthandler.register(signal.SIGALRM, file=2, chain=True)
        signal.setitimer(signal.ITIMER_REAL, max_seconds)
        code = _exit_code(given["args"][1:])
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _become_new(given: dict[str, Any], files: list[int], others: list[int]) -> None:
    """Undo what pytest and tests have done to this process.

    Files stay open: some are those of libuv, on which the store of torchrun depends.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.events._set_running_loop(None)
    asyncio.set_event_loop(None)
    if given.get("start_new_session"):
        os.setsid()
    for target, file in enumerate(files):
        if file not in (-1, target):
            os.dup2(file, target)
    for file in others:
        if file != -1:
            os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["env"] is not None:
        os.environ.clear()
        os.environ.update(given["env"])
    for name, module in [*sys.modules.items()]:
        path = getattr(module, "__file__", None) or ""
        if path.startswith(FRESH[:2]) or FRESH[2] in path:
            del sys.modules[name]
    own = {str(ROOT), str(ROOT / "tests"), str(ROOT / "examples"), ""}
    sys.path[:] = [*_paths(os.environ.get("PYTHONPATH")), *(path for path in sys.path if path not in own)]
    _default_warnings()


def _paths(variable: str | None) -> Iterable[str]:
    return variable.split(os.pathsep) if variable else ()


def _default_warnings() -> None:
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    for option in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        action, _, message = option.partition(":")
        warnings.filterwarnings(action, message)  # type: ignore[arg-type]


def _exit_code(arguments: list[str]) -> int:
    """Run a program; return what Python would exit with."""
    try:
        _execute(*map(os.fsdecode, arguments))
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _execute(what: str, *arguments: str) -> None:
    if what == "-u":
        return _execute(*arguments)
    if what == "-c":
        sys.argv, main = ["-c", *arguments[1:]], types.ModuleType("__main__")
        sys.path.insert(0, "")
        sys.modules["__main__"] = main
        exec(arguments[0], vars(main))
    elif what == "-m":
        sys.argv = list(arguments)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *arguments]
        sys.path.insert(0, str(Path(what).resolve().parent))
        runpy.run_path(what, run_name="__main__")
    return None
