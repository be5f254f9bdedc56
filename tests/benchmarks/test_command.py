"""Runs of the benchmarks: files, wrong contenders, Ctrl-C, options."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks import (
    adapters,
    command,
    devices,
    experts,
    layer,
    local,
    memory,
    muon,
    peak,
    quantized,
    ragged,
    route,
    rows_per_expert,
    scaling,
    sizes,
)
from benchmarks.alternatives.maxmoe_experts import MaxmoeExperts
from benchmarks.results import Case, Result
from benchmarks.timing import Runner
from maxmoe.quantization import QuantizedStack

COMMANDS = [experts.BENCHMARK, layer.BENCHMARK, memory.BENCHMARK, muon.BENCHMARK, scaling.BENCHMARK]
COMMANDS += [
    adapters.BENCHMARK,
    quantized.BENCHMARK,
    ragged.BENCHMARK,
    devices.BENCHMARK,
    local.BENCHMARK,
    route.BENCHMARK,
    rows_per_expert.BENCHMARK,
    sizes.BENCHMARK,
]
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("benchmark", COMMANDS, ids=lambda benchmark: benchmark.name)
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

    assert set(contents) == {"benchmark", "date", "interrupted", "machine", "options", "timing", "results"}
    assert contents["benchmark"] == benchmark.name
    assert contents["interrupted"] is False
    assert {"cpu", "cpu_flags", "threads", "torch", "maxmoe"} <= set(contents["machine"])
    assert contents["machine"]["threads"] == 1
    keys = {"shape", "sizes", "dtype", "mode", "contender", "kind", "seconds", "rounds", "numbers", "absent"}
    assert contents["results"]
    for result in contents["results"]:
        assert set(result) == keys
        assert result["seconds"] or result["numbers"] or result["absent"]
    assert (tmp_path / f"{benchmark.name}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert ("gmm" if benchmark is sizes.BENCHMARK else "maxmoe") in printed.out
    assert str(tmp_path / "results.json") in printed.out
    assert "100%" in printed.err


def test_medians_of_adapters_are_those_of_the_rounds() -> None:
    """Each round has its own ratio, so that a slow round does not count more than another."""
    shape = adapters.BENCHMARK.shapes["adapters"]
    case = Case("one", shape, torch.float32, "forward+backward")
    seconds = {adapters.OURS: [3.0, 40.0, 2.2], adapters.FROZEN: [2.0, 20.0, 2.0], adapters.OTHERS[0]: [6.0, 40.0]}
    results = [Result(case, name, "part", of) for name, of in seconds.items()]
    lines = adapters.summary(results).splitlines()
    assert "".join(lines[-1].split()) == "onefloat322000.03000.01.501.50"


def test_formats_are_compared_round_by_round() -> None:
    """Times relative to dense weights, and bytes per second relative to a read of memory."""
    shape = quantized.BENCHMARK.shapes["gpt-oss"]._replace(num_tokens=3)
    case = Case("one", shape, torch.bfloat16, "forward")
    seconds = {quantized.DENSE: [4.0, 40.0, 4.4], quantized.NAMES["mxfp4"]: [2.0, 10.0, 1.1], quantized.READ: [1.0]}
    num_bytes = {quantized.DENSE: 22.0, quantized.NAMES["mxfp4"]: 2.0, quantized.READ: 10.0}
    results = [
        Result(case, name, "part", of, numbers={"batches": 4, "bytes": num_bytes[name]}) for name, of in seconds.items()
    ]
    times, shares = quantized.summary(results).split("\n\n")
    assert times.splitlines()[-1].split() == ["one", "3", "bfloat16", "forward", "1100.0", "0.25"]
    assert shares.splitlines()[-1].split() == ["one", "3", "bfloat16", "forward", "0.50", "0.10"]


def test_a_format_with_other_bits_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = quantized.compute

    def compute(experts: quantized.Experts, *arguments: Any) -> list[Tensor]:
        is_quantized = isinstance(experts.down, QuantizedStack)
        return [2 * result if is_quantized else result for result in original(experts, *arguments)]

    monkeypatch.setattr(quantized, "compute", compute)
    with pytest.raises(RuntimeError, match="maxmoe, mxfp4 and its dequantized weights give different results"):
        run(quantized.BENCHMARK, tmp_path, "--shapes", "16x64x32x8x2", "--dtype", "float32")


def test_ctrl_c_keeps_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = 0

    def third_call_is_interrupted() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    def measure(session: command.Session, case: Case) -> None:
        session.time(case, [Runner("maxmoe", lambda: None, "maxmoe"), Runner("other", third_call_is_interrupted)])

    contents = run(dataclasses.replace(experts.BENCHMARK, measure=measure), tmp_path)
    assert contents["interrupted"] is True
    assert [len(result["seconds"]) > 0 for result in contents["results"]] == [True, True]
    assert "Interrupted" in capsys.readouterr().out
    assert (tmp_path / "experts.png").exists()


@pytest.mark.parametrize("benchmark", COMMANDS, ids=lambda benchmark: benchmark.name)
@pytest.mark.parametrize("num_calls", [1, *(pytest.param(count, marks=pytest.mark.sampled(4)) for count in (0, 2))])
def test_ctrl_c_at_any_time_gives_a_report(
    benchmark: command.Benchmark, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report leaves out cases with missing results."""

    def interrupted(runners: list[Runner], rounds: int) -> Any:
        for each in runners[:num_calls]:
            each.seconds.append(1.0)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(command, "round_robin", interrupted)
    monkeypatch.setattr(memory, "measure_apart", lambda *arguments: interrupted([], 0).__next__())
    shape = SHAPES.get(benchmark.name, "16x64x32x8x2")
    assert run(benchmark, tmp_path, "--shapes", shape)["interrupted"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "nobody"], "'nobody' should be a number, at least 1"),
        (["--shapes", "8x8"], "'8x8' should be 5 sizes"),
        (["--threads", "0"], "'0' should be a number, at least 1"),
        (["--dtype", "int8"], "int8"),
        (["--bound", "flops,cache"], "'cache' should be one of flops, bandwidth"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(experts.BENCHMARK, options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "options", "bounds"),
    [
        ("8x16x8x4x2", [], ["bound: mm float32", "bound: bandwidth"]),
        ("8x16x8x4x2", ["--bound", "flops"], ["bound: mm float32"]),
        ("8x16x8x4x2", ["--bound", "bandwidth"], ["bound: bandwidth"]),
        ("decode1", [], ["bound: bandwidth"]),
    ],
)
def test_bounds(
    shape: str, options: list[str], bounds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "contenders", lambda: [MaxmoeExperts()])
    benchmark = dataclasses.replace(experts.BENCHMARK, modes=["forward"])
    results = run(benchmark, tmp_path, "--shapes", shape, "--dtype", "float32", *options)["results"]
    assert [result["contender"] for result in results if result["kind"] == "bound"] == bounds


def test_every_command_knows_all_shapes_of_its_kind() -> None:
    options = command.parse_options(layer.BENCHMARK, ["--shapes", "A,qwen3,mixtral,deepseek,qwen3-E128-decode16"])
    assert options.shapes["deepseek"] == (1024, 7168, 2048, 32, 8)
    assert options.shapes["qwen3-E128-decode16"] == (16, 2048, 768, 128, 8)
    modes = {(case.name, case.mode) for case in layer.BENCHMARK.cases(options)}
    assert ("mixtral", "forward+backward") in modes
    assert {mode for name, mode in modes if "decode" in name} == {"forward"}


@pytest.mark.parametrize("benchmark", COMMANDS, ids=lambda benchmark: benchmark.name)
def test_help(benchmark: command.Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(benchmark, ["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m benchmarks.{benchmark.name}" in shown
    assert benchmark.description.strip().splitlines()[0] in shown
