"""`maxmoe.testing` needs no compiled operators: tests of `compare_ranks` run without them."""

import os
from pathlib import Path

from support import programs

ROOT = Path(__file__).parents[2]


# Processes with equal gradients and with a mistake; then what works without operators, and what does not.
PROGRAM = """
import pytest
test = "tests/testing/test_compare_ranks.py::test_it_starts_processes"
assert pytest.main(["-q", "-p", "no:cacheprovider", test]) == 0
import maxmoe
maxmoe.presets.mixtral()
maxmoe.sharding.LogicalRules.load("ep-tp")
maxmoe.MoE
"""


def test_ranks_are_compared_and_a_layer_says_what_is_missing() -> None:
    done = programs.python(PROGRAM, cwd=ROOT, env=os.environ | {"MAXMOE_CORE": "off"})
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == (
        "ImportError: layers and operators of maxmoe need its C++ core, got MAXMOE_CORE=off in the environment"
    )
