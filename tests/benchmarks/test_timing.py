"""The clock of the benchmarks: contenders in turn, rounds, calls that are not timed."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import timing
from benchmarks.timing import Runner, round_robin


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, ""

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if seconds:
            self.log += "z"
            self.now += seconds

    def takes(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.log += name
            self.now += seconds

        return call


def test_contenders_are_timed_in_turn_and_each_round_starts_with_another() -> None:
    clock = Clock()
    runners = [Runner(name, clock.takes(name, seconds)) for name, seconds in {"a": 1, "b": 2, "c": 0.5}.items()]
    assert list(round_robin(runners, 3, clock=clock, sleep=clock.sleep)) == [1, 2, 3]
    assert clock.log == "abc" + "abc" + "bca" + "cab"
    assert [each.seconds for each in runners] == [[1] * 3, [2] * 3, [0.5] * 3]
    assert [each.rounds for each in runners] == [3, 3, 3]


def test_what_comes_before_and_after_a_call_or_a_turn_is_not_timed() -> None:
    clock = Clock()
    seconds = timing.SECONDS_PER_TURN / 4.5
    untimed: dict[str, Any] = {
        "before": clock.takes("-", 7),
        "begin_turn": clock.takes("(", 3),
        "end_turn": clock.takes(")", 3),
    }
    one = Runner("a", clock.takes("a", seconds), settle_seconds=0.06, **untimed)
    list(round_robin([one], 1, clock=clock, sleep=clock.sleep))
    assert one.seconds == pytest.approx([seconds] * 4)
    assert clock.log.replace("z", "") == "(-a)" + "(-a-a-a-a)"


def test_short_calls_have_many_in_a_turn_and_slow_ones_few_rounds() -> None:
    clock = Clock()
    per_turn, slow = timing.SECONDS_PER_TURN, timing.SECONDS_PER_CONTENDER
    seconds = {
        "short": per_turn / 5.5,
        "shortest": per_turn / 1e6,
        "slow": slow,
        "slower": 3 * slow,
        "fair": slow / 4.5,
    }
    runners = [Runner(name, clock.takes("", time)) for name, time in seconds.items()]
    list(round_robin(runners, 6, clock=clock, sleep=clock.sleep))
    calls = {each.name: (len(each.seconds), each.rounds) for each in runners}
    most = 6 * timing.MAX_CALLS_PER_TURN
    assert calls == {"short": (30, 6), "shortest": (most, 6), "slow": (2, 2), "slower": (2, 2), "fair": (4, 4)}
