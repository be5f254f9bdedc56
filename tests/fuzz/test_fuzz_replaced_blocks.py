"""A short run of `fuzz_replaced_blocks.py`; the command line runs it for any time."""

import pytest

pytest.importorskip("transformers")

from fuzz.fuzz_replaced_blocks import one_case
from fuzz.loop import fuzz
from support.sampling import by_default


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("cases", by_default([range(8), range(8, 12)], [range(8)]), ids=str)
def test_random_models_with_replaced_blocks(cases: range) -> None:
    assert fuzz(one_case, seed=0, cases=cases, seconds=30).total() > 0
