"""Runs random cases, each with its own seed, for a number of cases or a time."""

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random

# Returns the outcome of the case, or counts of the outcomes of its parts.
Case = Callable[[Random], str | Counter[str]]


def random_of(seed: int, case: int) -> Random:
    return Random(f"{seed} {case}")


def fuzz(one_case: Case, seed: int, cases: range, seconds: float) -> Counter[str]:
    """Count the outcomes of the cases; an AssertionError names the first case that failed."""
    outcomes: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    for case in cases:
        try:
            outcome = one_case(random_of(seed, case))
            outcomes.update([outcome] if isinstance(outcome, str) else outcome)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}: {type(error).__name__}: {error}") from error
        if time.monotonic() > deadline:
            break
    return outcomes


def main(one_case: Case, description: str | None) -> int:
    """Run from a command line until the time is up or a signal comes, also after a failure; return the exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one, with its traceback")
    options = parser.parse_args()
    if options.case is not None:
        print(fuzz(one_case, options.seed, range(options.case, options.case + 1), 0.0))
        return 0
    outcomes: Counter[str] = Counter()
    case, deadline = 0, time.monotonic() + options.seconds
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, a shell has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while time.monotonic() < deadline:
            try:
                outcomes += fuzz(one_case, options.seed, range(case, case + 1), 0.0)
            except AssertionError as error:
                print(f"{error}"[:1000], file=sys.stderr, flush=True)
                outcomes["failed"] += 1
            case += 1
    print(f"{sum(outcomes.values())} cases: {dict(outcomes)}")
    return int("failed" in outcomes)
