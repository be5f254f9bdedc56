"""Runs random cases of a fuzzer, each with its own seed, until the time is up or Ctrl-C, also after a failure.

    python tests/fuzz/run.py layers --seconds 3600 --seed 1
    python tests/fuzz/run.py layers --seed 1 --case 4711    # only this case, with its traceback

A fuzzer is a module `fuzz_<name>.py` with a function `one_case`, which raises if a case fails.
"""

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

TESTS = Path(__file__).parents[1]
FUZZERS = sorted(path.stem.removeprefix("fuzz_") for path in Path(__file__).parent.glob("fuzz_*.py"))

Case = Callable[[Random], str]  # returns the outcome


def fuzz(one_case: Case, seed: int, cases: range) -> Counter[str]:
    """Count the outcomes of the cases; an AssertionError names the first case that failed."""
    outcomes: Counter[str] = Counter()
    for case in cases:
        try:
            outcomes[one_case(Random(f"{seed} {case}"))] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}: {type(error).__name__}: {error}") from error
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fuzzer", choices=FUZZERS)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one, with its traceback")
    options = parser.parse_args()
    one_case: Case = importlib.import_module(f"fuzz.fuzz_{options.fuzzer}").one_case
    if options.case is not None:
        print(fuzz(one_case, options.seed, range(options.case, options.case + 1)))
        return 0
    outcomes: Counter[str] = Counter()
    case, deadline = 0, time.monotonic() + options.seconds
    with suppress(KeyboardInterrupt):
        while time.monotonic() < deadline:
            try:
                outcomes += fuzz(one_case, options.seed, range(case, case + 1))
            except AssertionError as error:
                print(f"{error}"[:1000], file=sys.stderr, flush=True)
                outcomes["failed"] += 1
            case += 1
    print(f"{sum(outcomes.values())} cases: {dict(outcomes)}")
    return int("failed" in outcomes)


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    sys.exit(main())
