"""A short run of `fuzz_checkpoints.py`; the command line runs it for as long as one likes."""

import pytest

from fuzz.fuzz_checkpoints import fuzz


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_damaged_checkpoints_are_refused_or_load() -> None:
    outcomes = fuzz(seed=0, cases=range(300), seconds=60)
    assert outcomes["refused"] > 0 and outcomes["loaded"] > 0
