"""Runs of the benchmarks: files, contenders in turn, wrong results."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks import adapters, command, experts, local, memory, peak, quantized, rows_per_expert, sizes
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts
from benchmarks.results import Case
from benchmarks.timing import Runner, round_robin
from support.slow_cases import by_default

NAMES = "adapters devices experts layer local memory muon quantized ragged route rows_per_expert scaling sizes"
COMMANDS = [importlib.import_module(f"benchmarks.{name}").BENCHMARK for name in NAMES.split()]
SHAPES = {"ragged": "40x33,16x8", "route": "16x64x32x16x2", "sizes": "16x64x32"}


@pytest.fixture(autouse=True)
def short_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_per_expert, "ROWS_PER_EXPERT", (1, 3))
    monkeypatch.setattr(sizes, "SIZES", (8, 24))
    monkeypatch.setattr(quantized, "FEW", (1, 3))
    monkeypatch.setattr(quantized, "MANY", (5,))


class Doubled(MaxmoeExperts):
    """A contender with wrong results."""

    name, kind = "doubled", "alternative"

    def compute(self) -> Tensor:
        return 2 * super().compute()


def run(benchmark: command.Benchmark, out: Path, *options: str) -> dict[str, Any]:
    arguments = ["--out", str(out), "--threads", "1", *options]
    command.main(benchmark, arguments + (["--rounds", "1"] if benchmark.is_timed else []))
    contents: dict[str, Any] = json.loads((out / "results.json").read_text())
    return contents


def test_who_computes_something_else_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "contenders", lambda: [MaxmoeExperts(), Doubled()])
    results = run(experts.BENCHMARK, tmp_path, "--shapes", "8x16x8x4x2", "--dtype", "float32")["results"]
    of_doubled = [result for result in results if result["contender"] == "doubled"]
    assert all("wrong output: relative error 1.0e+00" in result["absent"] for result in of_doubled)
    assert len(of_doubled) == 3
    assert "doubled (forward+backward; forward; forward, weights changed): wrong output" in capsys.readouterr().out


def measure_here(name: str, case: Case, threads: int, experts: Any = None) -> tuple[dict[str, float], None]:
    return peak.answer(json.dumps([name, list(case.shape), case.dtype_name, case.mode, threads, experts])), None


@pytest.mark.parametrize("benchmark", by_default(COMMANDS, [experts.BENCHMARK]), ids=lambda benchmark: benchmark.name)
def test_a_run_writes_table_json_and_picture(
    benchmark: command.Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A process takes seconds to start: `memory` starts one, `local` and `adapters` measure in this process.
    monkeypatch.setattr(memory, "contenders", lambda: [MaxmoeExperts()])
    monkeypatch.setattr(local, "measure_apart", measure_here)
    monkeypatch.setattr(adapters, "measure_apart", measure_here)
    modes = benchmark.modes[:1] if benchmark is memory.BENCHMARK else benchmark.modes
    shape = SHAPES.get(benchmark.name, "16x64x32x8x2")
    contents = run(dataclasses.replace(benchmark, modes=modes), tmp_path, "--shapes", shape, "--dtype", "float32")

    assert contents["benchmark"] == benchmark.name and contents["interrupted"] is False
    assert contents["machine"]["threads"] == 1
    assert contents["results"]
    assert all(result["seconds"] or result["numbers"] or result["absent"] for result in contents["results"])
    assert (tmp_path / f"{benchmark.name}.png").exists()
    assert ("gmm" if benchmark is sizes.BENCHMARK else "maxmoe") in capsys.readouterr().out


def test_contenders_are_timed_in_turn_and_each_round_starts_with_another() -> None:
    now, log = 0.0, ""

    def takes(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal now, log
            now, log = now + seconds, log + name

        return call

    runners = [Runner(name, takes(name, seconds)) for name, seconds in {"a": 1, "b": 2, "c": 0.5}.items()]
    list(round_robin(runners, 3, clock=lambda: now, sleep=lambda seconds: takes("", seconds)()))
    assert log == "abc" + "abc" + "bca" + "cab"  # the first round is not timed
    assert [each.seconds for each in runners] == [[1] * 3, [2] * 3, [0.5] * 3]
