"""Tests marked `waits` run at the same time, and are reported as others are."""

import sys
from pathlib import Path

from support.forked_python import ROOT, run

CONFTEST = """
def pytest_configure(config):
    from support.waiting import Waiting

    config.addinivalue_line("markers", "waits: in forks")
    config.pluginmanager.register(Waiting())
"""

MODULE = """
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(): return Path(__file__).parent


def test_before(folder): ...


@pytest.mark.waits
@pytest.mark.parametrize(("mine", "other"), ["ab", "ba"])
def test_each_waits_for_the_other(folder, tmp_path, mine, other):
    (folder / mine).touch()
    end = time.monotonic() + 30
    while not (folder / other).exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not list(tmp_path.iterdir())


@pytest.mark.waits
def test_fails():
    print("what a fork printed")
    assert 1 == 2


@pytest.mark.waits
def test_is_skipped():
    pytest.skip("for a reason")


def test_after(folder): ...
"""


def test_they_run_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "test_next.py").write_text("def test_next(): ...\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = run([*command, f"--rootdir={tmp_path}", str(tmp_path)], cwd=ROOT / "tests")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 5 passed, 1 skipped" in done.stdout
    assert "what a fork printed" in done.stdout and "assert 1 == 2" in done.stdout
