"""A short run of `fuzz_configs.py`; the command line runs it for as long as one likes."""

from fuzz import fuzz_configs
from fuzz.loop import fuzz


def test_configs_compute_or_are_refused() -> None:
    outcomes = fuzz(fuzz_configs.one_case, seed=0, cases=range(800), seconds=30)
    for subject in ("layer", "decoder", "family"):
        assert outcomes[f"{subject} refused"] > 0 < outcomes[f"{subject} computed"] + outcomes[f"{subject} read"], (
            outcomes
        )
