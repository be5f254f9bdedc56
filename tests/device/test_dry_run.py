"""The device check runs, on the CPU and with few small cases, so that it works on the day when a GPU is there."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import Shape
from device import experts
from support import programs

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "run.sh"
STEPS = ["tests", "operators", "sanitizers", "rows", "speed", "kernels", "ncu", "layers", "models"]
PROGRAMS = {"tests", "sanitizers", "ncu"}  # steps that are not scripts, and need a GPU
SLOW = ["rows", "speed", "kernels", "layers", "models"]


@pytest.mark.parametrize("step", ["operators", *(pytest.param(step, marks=pytest.mark.slow) for step in SLOW)])
def test_every_case_passes_on_the_cpu(tmp_path: Path, step: str) -> None:
    out = tmp_path / "results.json"
    paths = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    options = ["--device", "cpu", "--tiny", "--out", str(out)]
    done = programs.run([sys.executable, "-m", f"device.{step}", *options], cwd=ROOT, env=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    check_results(out, step)


def check_results(path: Path, step: str) -> dict[str, dict[str, Any]]:
    """Check that all cases of a step passed; return them by group."""
    sections = json.loads(path.read_text())
    assert sections["machine"]["torch"] == torch.__version__
    groups: dict[str, dict[str, Any]] = sections[step]
    cases = [values for group in groups.values() for values in group.values()]
    assert cases and not [values for values in cases if values.get("ok") is False or "not_run" in values]
    return groups


CRASH = """
import os
from device.cases import main

def illegal_access(cases):
    cases._device_error = lambda: "illegal access"
    return {"ok": True}

def check(cases):
    cases.run("group", "first", lambda cases: {"ok": True})
    cases.run("group", "crash", lambda cases: os.abort())
    cases.run("group", "illegal access", illegal_access)
    cases.run("group", "wrong", lambda cases: {"ok": False})
    cases.run("group", "last", lambda cases: {"ok": True})

main("planted", check)
"""


def test_a_crash_costs_one_case(tmp_path: Path) -> None:
    script, out = tmp_path / "planted.py", tmp_path / "results.json"
    script.write_text(CRASH)
    paths = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = programs.run([sys.executable, str(script), "--device", "cpu", "--out", str(out)], cwd=ROOT, env=paths)
    assert done.returncode == 1 and "planted: 2 passed, 3 failed, 0 not run" in done.stdout, done.stdout + done.stderr
    cases = json.loads(out.read_text())["planted"]["group"]
    assert {name: values["ok"] for name, values in cases.items()} == {
        "first": True,
        "crash": False,
        "illegal access": False,
        "wrong": False,
        "last": True,
    }
    assert cases["crash"]["error_message"] == "the process of this case ended with exit code -6"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["planted.py", "results.json"]


def test_contenders_compute_the_same() -> None:
    problem = experts.draw(Shape(20, 16, 8, 6, 3), torch.float32, torch.device("cpu"))
    expected = experts.ours(problem, backward=True)
    for contender in experts.CONTENDERS.values():
        got = contender(problem, backward=True)
        for name in ("out", "x", "weights", "down"):
            torch.testing.assert_close(got[name], expected[name])
        gate_up = got.get("gate_up", torch.cat([expected["gate"], expected["up"]], 2))
        torch.testing.assert_close(gate_up, torch.cat([expected["gate"], expected["up"]], 2))


@pytest.mark.slow
def test_the_script_runs_the_steps(tmp_path: Path) -> None:
    """Run one step here; the others are files that the script names, or need a GPU."""
    assert f"STEPS:={' '.join(STEPS)}" in SCRIPT.read_text()
    assert {path.stem for path in SCRIPT.parent.glob("*.py")} >= set(STEPS) - PROGRAMS
    settings = {
        "OUT": str(tmp_path),
        "PYTHON": sys.executable,
        "STEPS": "tests sanitizers ncu rows",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", str(SCRIPT), "--device", "cpu", "--tiny"]
    done = programs.run(command, cwd=ROOT, env=os.environ | settings)
    assert done.returncode == 0 and done.stdout.endswith("failed: nothing\n"), done.stdout + done.stderr
    check_results(tmp_path / "results.json", "rows")
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "log.txt"}
