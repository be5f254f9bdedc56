"""Wrong arguments of every registered operator end in an error that names it, never in a crash or a wrong number."""

import sys
from pathlib import Path

from support import programs


def test_hostile_calls() -> None:
    program = Path(__file__).parents[1] / "support/hostile_calls.py"
    done = programs.run([sys.executable, str(program)])
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"exit status {done.returncode} at {last}\n{done.stderr[-2000:]}"
