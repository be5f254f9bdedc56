"""A short run of `fuzz_rules.py`; the command line runs it for any time."""

import pytest

from fuzz import fuzz_rules
from fuzz.loop import fuzz
from support.sampling import by_default


@pytest.mark.parametrize("cases", by_default([range(150), range(150, 600)], [range(150)]), ids=str)
@pytest.mark.filterwarnings("ignore:no rule for the logical name")
def test_rules_are_read_as_written_or_refused(cases: range) -> None:
    outcomes = fuzz(fuzz_rules.one_case, seed=0, cases=cases, seconds=30)
    assert len(outcomes) == 7, outcomes


def test_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_rules.LogicalRules, "load", lambda _: bytearray(2 * fuzz_rules.BYTES))
    with pytest.raises(AssertionError, match="MemoryError"):
        fuzz(fuzz_rules.one_case, seed=0, cases=range(10), seconds=30)
