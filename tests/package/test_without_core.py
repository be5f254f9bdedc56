"""`maxmoe.testing` needs no compiled operators: tests of `compare_ranks` run without them."""

import os
import sys
from pathlib import Path

import pytest

from support import programs

ROOT = Path(__file__).parents[2]


@pytest.mark.sampled(0)
def test_the_comparison_of_ranks() -> None:
    files = [f"tests/testing/test_{name}.py" for name in ("compare_ranks", "comparison", "batches")]
    # Processes with equal gradients and with a mistake, batches.
    tests = "starts_processes or batches_of_any_form"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, *files]
    text = programs.printed(programs.run(command, cwd=ROOT, env=os.environ | {"MAXMOE_CORE": "off"}))
    assert " passed" in text


def test_a_layer_says_what_is_missing() -> None:
    code = "import maxmoe; maxmoe.presets.mixtral(); maxmoe.sharding.LogicalRules.load('ep-tp'); maxmoe.MoE"
    done = programs.python(code, env=os.environ | {"MAXMOE_CORE": "off"})
    assert done.stderr.splitlines()[-1] == (
        "ImportError: layers and operators of maxmoe need its C++ core, got MAXMOE_CORE=off in the environment"
    )
