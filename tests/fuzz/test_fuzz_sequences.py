"""Random sequences of operations on a mesh, and mistakes that the fuzzer must find."""

import pytest

from fuzz import fuzz_sequences
from fuzz.loop import fuzz
from maxmoe.parallel import RankError
from maxmoe.parallel.apply import interruptions


def test_sequences() -> None:
    outcomes = fuzz(fuzz_sequences.one_case, 0, range(3), 60.0)
    assert outcomes.keys() == {*fuzz_sequences.NAMES}


def test_a_forward_that_leaves_something_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptions, "reset_fsdp", lambda _: None)
    monkeypatch.setattr(fuzz_sequences, "LAYOUTS", [fuzz_sequences.MeshRules("pure-fsdp", {"fsdp": 2})])
    with pytest.raises((RankError, AssertionError)):
        fuzz(fuzz_sequences.one_case, 0, range(2), 60.0)
