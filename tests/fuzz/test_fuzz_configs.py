"""A short run of `fuzz_configs.py`; the command line runs it for any time."""

import pytest
import torch

from fuzz import fuzz_configs
from fuzz.loop import fuzz
from support.sampling import by_default

# Warnings of settings that train no router, which the fuzzer draws too.
pytestmark = pytest.mark.filterwarnings("ignore:top_k=1 with normalization:UserWarning")


@pytest.mark.parametrize("cases", by_default([range(500), range(500, 1000)], [range(500)]), ids=str)
def test_configs_compute_or_are_refused(cases: range) -> None:
    outcomes = fuzz(fuzz_configs.one_case, seed=0, cases=cases, seconds=30)
    for subject in ("layer", "decoder", "family"):
        assert outcomes[f"{subject} refused"] > 0 < outcomes[f"{subject} computed"] + outcomes[f"{subject} read"], (
            outcomes
        )


def test_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_configs, "compute", lambda *_: torch.empty(16 * fuzz_configs.BYTES, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="allocate memory"):
        fuzz(fuzz_configs.one_case, seed=0, cases=range(200), seconds=30)
