"""A short run of `fuzz_overrides.py`; the command line runs it for any time."""

from random import Random

import pytest

from fuzz import fuzz_overrides
from fuzz.loop import fuzz
from maxmoe.sharding import LogicalRules


@pytest.mark.slow
def test_any_table_of_rules_is_exact_or_refused() -> None:
    outcomes = fuzz(fuzz_overrides.one_case, seed=0, cases=range(12), seconds=600)
    assert sum(outcomes.values()) > 0


def test_everything_is_drawn() -> None:
    random, drawn = Random(0), set()
    for _ in range(150):
        name = random.choice(fuzz_overrides.PRESETS)
        preset = LogicalRules.load(name)
        sizes = fuzz_overrides.draw_mesh(random, preset)
        table = fuzz_overrides.draw_table(random, preset, sizes)
        drawn |= {name, *sizes, table.model, table.dispatch, "ran" if table.refusal is None else "refused"}
        drawn |= {rule for rule, _ in table.overrides} | {len(axes) for _, axes in table.overrides}
    expected = {*fuzz_overrides.PRESETS, *fuzz_overrides.AXES, *fuzz_overrides.LAYERS, *fuzz_overrides.DECODERS}
    expected |= {*LogicalRules.load("default").names} - {"layers"} | {*fuzz_overrides.DISPATCHES, 0, 1, 2, 3}
    assert drawn >= expected | {"ran", "refused"}, expected - drawn
