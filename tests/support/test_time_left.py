"""The time that is left, from the durations of an earlier run."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from support.time_left import DURATIONS, TimeLeft


def config_with(cache: dict[str, Any]) -> Any:
    reporter = SimpleNamespace(_get_progress_information_message=lambda: " [ 10%]")
    return SimpleNamespace(
        cache=SimpleNamespace(get=cache.get, set=cache.__setitem__),
        get_terminal_writer=lambda: SimpleNamespace(fullwidth=80),
        pluginmanager=SimpleNamespace(get_plugin=lambda name: reporter),
        reporter=reporter,
    )


def report(nodeid: str, when: str, duration: float) -> Any:
    return SimpleNamespace(nodeid=nodeid, when=when, duration=duration)


def test_a_busy_machine_is_taken_into_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three tests took a tenth of the time last time; now it took 20 seconds, so 180 are left."""
    cache: dict[str, Any] = {DURATIONS: {"a": 1.0, "b": 4.0, "c": 5.0}}
    config, now = config_with(cache), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    left = TimeLeft(config)
    left.start(["a", "b", "c"])
    assert left.estimate() == ""
    now += 20
    for when, duration in (("setup", 0.5), ("call", 1.0), ("teardown", 0.5)):
        left.pytest_runtest_logreport(report("a", when, duration))
    assert config.reporter._get_progress_information_message() == " [ 10%] 3:00 left"
    left.pytest_sessionfinish()
    assert cache[DURATIONS] == {"a": 2.0, "b": 4.0, "c": 5.0}


def test_a_first_run_has_no_estimate() -> None:
    left = TimeLeft(config_with({DURATIONS: {"a": 1.0}}))
    left.start(["a", "b", "c"])
    left.pytest_runtest_logreport(report("a", "teardown", 0.0))
    assert left.estimate() == ""
