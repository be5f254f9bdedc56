"""A short run of `fuzz_layers.py`; the command line runs it for any time."""

import dataclasses
from random import Random
from typing import Any, Literal, get_args, get_origin

import pytest

from fuzz import fuzz_layers
from fuzz.loop import fuzz
from maxmoe import MoEConfig
from support.operator_calls import Result
from support.sampling import by_default

# Warnings of settings that train no router, which the fuzzer draws too.
pytestmark = pytest.mark.filterwarnings("ignore:top_k=1 with normalization:UserWarning")


@pytest.mark.parametrize("cases", by_default([range(20), range(20, 80)], [range(20)]), ids=str)
def test_layers_are_the_specification(cases: range) -> None:
    outcomes = fuzz(fuzz_layers.one_case, seed=0, cases=cases, seconds=30)
    assert all(outcomes[str(dtype)] > 0 for dtype in fuzz_layers.DTYPES), outcomes


def test_every_field_is_drawn() -> None:
    random = Random(0)
    configs = [fuzz_layers.draw_config(random) for _ in range(500)]
    for field in dataclasses.fields(MoEConfig):
        drawn = {getattr(config, field.name) for config in configs}
        choices = get_args(field.type) if get_origin(field.type) is Literal else ()
        assert len(drawn) > 1 and drawn >= set(choices), field.name


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_layer = fuzz_layers.run_layer

    def almost(*arguments: Any) -> Result:
        got = run_layer(*arguments)
        assert got.gradients["x"] is not None
        got.gradients["x"] *= 1 + 1e-9
        return got

    monkeypatch.setattr(fuzz_layers, "run_layer", almost)
    with pytest.raises(AssertionError, match=r"torch.float64 .* gradient of x: error"):
        fuzz(fuzz_layers.one_case, seed=0, cases=range(20), seconds=30)
