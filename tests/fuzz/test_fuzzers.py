"""A short run of each fuzzer; the command line runs it for any time."""

from functools import partial

import pytest

from fuzz import fuzz_configs, fuzz_layers, fuzz_overrides, fuzz_sequences
from fuzz.run import Case, fuzz

# Warnings of settings that the fuzzers draw too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:top_k=1 with normalization:UserWarning"),
    pytest.mark.filterwarnings("ignore:no rule for the logical name"),
]


@pytest.mark.parametrize(
    ("one_case", "cases", "outcomes"),
    [
        (fuzz_layers.one_case, range(20), {"torch.float64", "torch.float32", "torch.bfloat16"}),
        (fuzz_configs.one_case, range(300), {"layer refused", "layer computed", "decoder refused", "decoder computed"}),
        (partial(fuzz_sequences.one_case, cases=2), range(1), set()),
        (partial(fuzz_overrides.one_case, tables=4, ranks=(2,)), range(1), set()),
        pytest.param(fuzz_layers.one_case, range(20, 80), set(), marks=pytest.mark.slow),
        pytest.param(fuzz_sequences.one_case, range(2), {*fuzz_sequences.NAMES}, marks=pytest.mark.slow),
        pytest.param(fuzz_overrides.one_case, range(12), set(), marks=pytest.mark.slow),
    ],
    ids=["layers", "configs", "sequences", "overrides"]
    + [f"{name}, more" for name in ("layers", "sequences", "overrides")],
)
def test_a_short_run(one_case: Case, cases: range, outcomes: set[str]) -> None:
    assert fuzz(one_case, 0, cases).keys() >= outcomes
