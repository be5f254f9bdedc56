"""Random sequences of operations on a mesh, and mistakes that the fuzzer must find."""

from functools import partial

import pytest

from fuzz import fuzz_sequences
from fuzz.loop import fuzz
from maxmoe.parallel.apply import interruptions

# The first three sequences of a case on two ranks have all operations.
CASES = [(0, 3), *(pytest.param(case, 8, marks=pytest.mark.slow) for case in range(3))]


@pytest.mark.parametrize(("case", "num_sequences"), CASES)
def test_sequences(case: int, num_sequences: int) -> None:
    one_case = partial(fuzz_sequences.one_case, cases=num_sequences)
    outcomes = fuzz(one_case, 0, range(case, case + 1), 60.0)
    assert outcomes.keys() == {*fuzz_sequences.NAMES}


def test_a_forward_that_leaves_something_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptions, "reset_fsdp", lambda _: None)
    monkeypatch.setattr(fuzz_sequences, "LAYOUTS", [fuzz_sequences.MeshRules("pure-fsdp", {"fsdp": 2})])
    with pytest.raises(AssertionError, match=r"number 0: .* on a scale of"):
        fuzz(partial(fuzz_sequences.one_case, cases=1), 0, range(8, 9), 60.0)
