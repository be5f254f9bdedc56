"""The remaining time of a run, beside the percentage that pytest prints."""

import time
from collections import Counter

import pytest

DURATIONS = "maxmoe/durations"  # in pytest's cache
SHORT = 0.02  # seconds, assumed for a test that is not in the cache


class TimeLeft:
    """Estimates the remaining time: elapsed time * (remaining tests / finished tests), in durations of the last run.

    So a busy machine and any number of processes are taken into account. A first run has no estimate.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
        self.last: dict[str, float] = self.cache.get(DURATIONS, {}) if self.cache else {}
        self.durations: Counter[str] = Counter()
        self.left: set[str] = set()
        self.done = self.begin = 0.0
        self.is_known = False
        config.get_terminal_writer().fullwidth -= len(" 59:59 left")
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        percentage = reporter._get_progress_information_message
        reporter._get_progress_information_message = lambda: f"{percentage()} {self.estimate()}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.start([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.start(ids)

    def start(self, ids: list[str]) -> None:
        self.left, self.begin = set(ids), time.monotonic()
        self.is_known = 2 * sum(nodeid in self.last for nodeid in ids) > len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] += report.duration
        if report.when == "teardown" and report.nodeid in self.left:
            self.left.remove(report.nodeid)
            self.done += self.last.get(report.nodeid, SHORT)

    def estimate(self) -> str:
        """Return minutes and seconds."""
        if not self.done or not self.is_known:
            return ""
        to_come = sum(self.last.get(nodeid, SHORT) for nodeid in self.left)
        seconds = round((time.monotonic() - self.begin) * to_come / self.done)
        return f"{seconds // 60}:{seconds % 60:02d} left"

    def pytest_sessionfinish(self) -> None:
        if self.cache:
            durations = {nodeid: round(seconds, 3) for nodeid, seconds in self.durations.items()}
            self.cache.set(DURATIONS, self.last | durations)
