"""Wrong arguments of every registered operator end in an error that names it, never in a crash or a wrong number."""

import os
import subprocess
import sys
from pathlib import Path

import maxmoe


def test_hostile_calls() -> None:
    program = Path(__file__).parents[1] / "support/hostile_calls.py"
    done = subprocess.run(
        [sys.executable, program],
        env=os.environ | {"PYTHONPATH": str(Path(maxmoe.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"exit status {done.returncode} at {last}\n{done.stderr[-2000:]}"
