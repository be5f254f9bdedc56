"""A forked program that hangs ends with the stacks of its threads, before the program that has started it."""

import signal
import sys

import pytest

from support import forked_python

HANGS = """
import time

def hang():
    time.sleep(60)

hang()
"""
STARTS_IT = f"""
import sys
from support import forked_python

forked_python.EARLIER_SECONDS = 25.0
done = forked_python.run([sys.executable, "-c", {HANGS!r}])
print(done.returncode)
print(done.stderr, file=sys.stderr)
"""


def test_hanging_program_ends_with_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_python, "MAX_SECONDS", 26.0)
    monkeypatch.setenv("PYTHONPATH", str(forked_python.ROOT / "tests"))
    done = forked_python.run([sys.executable, "-c", STARTS_IT])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == -signal.SIGALRM
    assert "in hang\n" in done.stderr
