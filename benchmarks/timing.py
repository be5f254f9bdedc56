"""The clock: contenders timed in turn."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# A contender that is slower than this over a case sits out the rounds that are left, but never one of the first.
SECONDS_PER_CONTENDER = 10.0
MIN_ROUNDS = 2

# A turn is several calls where they are short: the first one finds the caches full of the others' data.
SECONDS_PER_TURN = 0.02
MAX_CALLS_PER_TURN = 20


@dataclass
class Runner:
    """Something to be timed, and its times.

    Attributes:
        name: for the table.
        call: what is timed; its result is freed after the clock has stopped.
        kind: "maxmoe", "alternative", "part" or "bound".
        before: called before every call, not timed.
        settle_seconds: to wait after its turn, for threads that go on spinning.
        begin_turn: called before the first call of a turn, not timed.
        end_turn: called after the last one.
        warm_up_seconds: of a call before the first round, None if there was none yet.
        seconds: of every call.
        rounds: that it took part in.
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
    """Let everybody warm up with a call that does not count, then time them in turn.

    The times are added to `seconds` call by call, so that an interrupted run keeps them. Each round starts with
    another runner: nobody always comes after the same one.

    Yields:
        The number of each round that is done, from 1.
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
