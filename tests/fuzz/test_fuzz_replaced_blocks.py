"""A short run of `fuzz_replaced_blocks.py`; the command line runs it for any time."""

import pytest

pytest.importorskip("transformers")

from fuzz.fuzz_replaced_blocks import one_case
from fuzz.loop import fuzz


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")
def test_random_models_with_replaced_blocks() -> None:
    assert fuzz(one_case, seed=0, cases=range(8), seconds=30).total() > 0
