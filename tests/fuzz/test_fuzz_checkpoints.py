"""A short run of `fuzz_checkpoints.py`; the command line runs it for any time."""

from pathlib import Path
from random import Random

import pytest

from fuzz import fuzz_checkpoints
from fuzz.child import Child
from fuzz.loop import fuzz
from support.sampling import by_default


@pytest.mark.parametrize("cases", by_default([range(50), range(50, 300)], [range(50)]), ids=str)
def test_damaged_checkpoints_are_refused_or_load(cases: range) -> None:
    with Child(fuzz_checkpoints.one_case) as child:
        outcomes = fuzz(child, seed=0, cases=cases, seconds=60)
    assert outcomes["refused"] > 0 and outcomes["loaded"] > 0


def test_code_that_a_file_ran_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz_checkpoints, "damaged_and_loaded", lambda *_: Path("created").mkdir())
    with pytest.raises(AssertionError, match="a file ran code"):
        fuzz_checkpoints.one_case(Random(0))
