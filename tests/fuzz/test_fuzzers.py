"""A short run of each fuzzer; the command line runs it for any time."""

import pytest

from fuzz import fuzz_configs, fuzz_layers
from fuzz.run import Case, fuzz


@pytest.mark.filterwarnings("ignore:top_k=1 with normalization:UserWarning")  # a setting that they draw, too
@pytest.mark.parametrize(
    ("one_case", "cases", "outcomes"),
    [
        (fuzz_layers.one_case, range(30), {"torch.float64", "torch.float32", "torch.bfloat16"}),
        (fuzz_configs.one_case, range(300), {"layer refused", "layer computed", "decoder refused", "decoder computed"}),
        pytest.param(fuzz_layers.one_case, range(30, 200), set(), marks=pytest.mark.slow),
    ],
    ids=["layers", "configs", "layers, more"],
)
def test_a_short_run(one_case: Case, cases: range, outcomes: set[str]) -> None:
    assert fuzz(one_case, 0, cases).keys() >= outcomes
