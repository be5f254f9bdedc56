"""`maxmoe.testing` needs no compiled operators: tests of `compare_ranks` run without them."""

import os
import sys
from pathlib import Path

import pytest

import maxmoe
from support import programs
from support.slow_cases import by_default

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_comparison_of_ranks() -> None:
    files = [f"tests/testing/test_{name}.py" for name in ("training_runs", "batches")]
    # Processes with equal gradients and with a mistake, batches.
    tests = "starts_processes or batches_of_any_form"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, *files]
    text = programs.printed(programs.run(command, cwd=ROOT, env=os.environ | {"MAXMOE_CORE": "off"}))
    assert " passed" in text


OFF = "layers and operators of maxmoe need its C++ core, got MAXMOE_CORE=off in the environment"


def test_a_layer_says_what_is_missing() -> None:
    code = "import maxmoe; maxmoe.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=8, top_k=2); "
    code += "maxmoe.sharding.LogicalRules.load('ep-tp'); "
    code += "print(maxmoe.build_info()); maxmoe.MoE"
    done = programs.python(code, env=os.environ | {"MAXMOE_CORE": "off"})
    assert done.stdout == f"{ {'core': OFF, 'version': maxmoe.__version__} }\n"
    assert done.stderr.splitlines()[-1] == f"ImportError: {OFF}"


@pytest.mark.parametrize("command", by_default(["plan", "explain", "estimate", "info"], ["plan", "info"]))
def test_commands_say_what_is_missing(command: str) -> None:
    done = programs.run([sys.executable, "-m", "maxmoe", command], env=os.environ | {"MAXMOE_CORE": "off"})
    if command == "info":
        assert done.returncode == 0 and ["core", OFF] in [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    else:
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {OFF}\n")
