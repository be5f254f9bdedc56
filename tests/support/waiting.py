"""Tests marked `waits` wait for timeouts most of their time: those of a file run at the same time, each in a fork."""

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

AT_ONCE = 6  # with four ranks each


@dataclass
class Waiting:
    """Runs tests in forks, before their turn comes, and reports them when it comes."""

    folder: Path | None = None  # of the reports
    to_come: list[pytest.Item] = field(default_factory=list)
    running: dict[str, ForkProcess] = field(default_factory=dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not is_waiting(item):
            return None
        if self.folder is None:  # and with it, before the first fork, the folder of all temporary folders
            self.folder = item.config._tmp_path_factory.mktemp("waits")  # type: ignore[attr-defined]
        if item.nodeid not in self.running and item not in self.to_come:
            self.to_come = [other for other in item.session.items if other.path == item.path and is_waiting(other)]
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.session._setupstate.teardown_exact(nextitem)  # of fixtures of modules before
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        for process in self.running.values():
            process.kill()
            process.join()

    def _reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Wait until the test is done; whenever one ends, the next of its file starts."""
        while item in self.to_come or self.running[item.nodeid].exitcode is None:
            active = [process for process in self.running.values() if process.exitcode is None]
            for other in self.to_come[: AT_ONCE - len(active)]:
                self.to_come.remove(other)
                active.append(self._start(other))
                self.running[other.nodeid] = active[-1]
            if active:  # without one, all have ended since the loop asked, and waiting for nothing never ends
                wait([process.sentinel for process in active])
        process, path = self.running.pop(item.nodeid), self._path(item)
        if not path.exists():
            raise RuntimeError(f"the fork of {item.nodeid} ended with status {process.exitcode}, without a report")
        for report in pickle.loads(path.read_bytes()):
            yield item.config.hook.pytest_report_from_serializable(config=item.config, data=report)

    def _start(self, item: pytest.Item) -> ForkProcess:
        process = get_context("fork").Process(target=_main, args=(item, self._path(item)))
        process.start()
        return process

    def _path(self, item: pytest.Item) -> Path:
        assert self.folder is not None
        return self.folder / f"{item.session.items.index(item)}.reports"


def is_waiting(item: pytest.Item) -> bool:
    return item.get_closest_marker("waits") is not None


def _main(item: Any, path: Path) -> NoReturn:
    """What a fork does; `os._exit` skips what pytest does at its end."""
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture.is_globally_capturing():  # into files of its own, not into those that all forks share
        capture.stop_global_capturing()
        capture.start_global_capturing()
    try:
        # The next test is in the same module: fixtures of modules and sessions belong to the first process.
        reports = runtestprotocol(item, nextitem=item.parent, log=False)
        hook = item.config.hook.pytest_report_to_serializable
        path.write_bytes(pickle.dumps([hook(config=item.config, report=report) for report in reports]))
    finally:
        os._exit(0)
