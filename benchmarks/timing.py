"""The clock: contenders timed in turn."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# A contender with more seconds than this in a case skips the remaining rounds, but none of the first rounds.
SECONDS_PER_CONTENDER = 10.0
MIN_ROUNDS = 2

# A turn has several calls if they are short, because before the first one the caches contain other contenders' data.
SECONDS_PER_TURN = 0.02
MAX_CALLS_PER_TURN = 20


@dataclass
class Runner:
    """A function to be timed, and its times.

    Attributes:
        name: name in the table.
        call: the timed function; its result is freed after the clock has stopped.
        kind: "maxmoe", "alternative", "part" or "bound".
        before: called before every call, not timed.
        settle_seconds: pause after its turn, for threads that spin on.
        begin_turn: called before the first call of a turn, not timed.
        end_turn: called after the last call of a turn, not timed.
        warm_up_seconds: time of a call before the first round, None before such a call.
        seconds: time of every call.
        rounds: number of rounds so far.
    """

    name: str
    call: Callable[[], object]
    kind: str = "alternative"
    before: Callable[[], object] | None = None
    settle_seconds: float = 0.0
    begin_turn: Callable[[], object] = lambda: None
    end_turn: Callable[[], object] = lambda: None
    warm_up_seconds: float | None = None
    seconds: list[float] = field(default_factory=list)
    rounds: int = 0


def round_robin(
    runners: list[Runner],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[int]:
    """Call each runner once to warm up, then time the runners in turn.

    The times are added to `seconds` call by call, so that an interrupted run keeps them. Each round starts with another
    runner, so that no runner always follows the same one.

    Yields:
        The number of each finished round, from 1.
    """
    for runner in runners:
        if runner.warm_up_seconds is None:
            [runner.warm_up_seconds] = _turn(runner, 1, clock)
            sleep(runner.settle_seconds)
    for number in range(rounds):
        first = number % max(len(runners), 1)
        for runner in runners[first:] + runners[:first]:
            assert runner.warm_up_seconds is not None
            shortest = min([runner.warm_up_seconds, *runner.seconds])
            calls = min(max(int(SECONDS_PER_TURN / max(shortest, 1e-9)), 1), MAX_CALLS_PER_TURN)
            if number >= MIN_ROUNDS and sum(runner.seconds) + calls * shortest > SECONDS_PER_CONTENDER:
                continue
            for seconds in _turn(runner, calls, clock):
                runner.seconds.append(seconds)
            runner.rounds += 1
            sleep(runner.settle_seconds)
        yield number + 1


def _turn(runner: Runner, calls: int, clock: Callable[[], float]) -> Iterator[float]:
    runner.begin_turn()
    for _ in range(calls):
        yield _timed_call(runner, clock)
    runner.end_turn()


def _timed_call(runner: Runner, clock: Callable[[], float]) -> float:
    if runner.before is not None:
        runner.before()
    start = clock()
    result = runner.call()
    seconds = clock() - start
    del result
    return seconds
