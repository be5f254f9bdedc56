"""`python -m maxmoe`: plans of published models, and a description of the installation."""

import re
import sys
from pathlib import Path

import pytest
import torch

from maxmoe import build_info
from maxmoe.cli.main import main
from maxmoe.cli.waiting_threads import waiting_of_this_process
from maxmoe.families.family import published_models
from support import programs
from support.slow_cases import by_default


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")


def run(*arguments: str) -> tuple[int, str]:
    try:
        return main(["explain", *arguments]), ""
    except SystemExit as end:
        return int(end.code or 0), "usage"


@pytest.mark.parametrize("name", by_default(published_models(), []))
def test_every_model_can_be_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    num_layers = published_models()[name].sizes.get("num_dense_layers", 0) + 2
    mesh = ("--mesh", "fsdp=2,expert=-1", "--world-size", "8", "--num-layers", str(num_layers))
    assert run("--preset", name, "--rules", "shard-exp-on-fsdp", *mesh) == (0, "")
    text = capsys.readouterr().out
    assert text.startswith(f"{published_models()[name].name}: a Decoder of {num_layers} layers")
    assert "8 ranks: fsdp=2,expert=-1. Rules: shard-exp-on-fsdp." in text
    assert published_models()[name].differs in text
    assert "state of adamw" in text and "reduce-scatter" in text


def test_256_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--preset deepseek_v3 --num-layers 3 --num-dense-layers 1"
    assert run(*f"{sizes} --mesh fsdp=16,expert=16 --rules shard-exp-on-fsdp".split()) == (0, "")
    text = capsys.readouterr().out
    assert text.startswith("DeepSeek-V3: a Decoder of 3 layers")
    assert "256 ranks: fsdp=16,expert=16. Rules: shard-exp-on-fsdp." in text and "state of adamw" in text
    rows = [line.split() for line in text.splitlines()]
    (up_proj,) = (row for row in rows if row[:2] == ["blocks.1-2.feed_forward.experts.up_proj", "x2"])
    # One expert of 256 on each of 256 ranks, in each of two layers, in bfloat16.
    assert "[1, 7168, 2048]" in " ".join(up_proj)
    assert " ".join(up_proj[-2:]) == f"{2 * 7168 * 2048 * torch.bfloat16.itemsize / 2**20:.2f} MiB"


def test_stages(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--preset", "olmoe", "--num-layers", "4", "--mesh", "stage=2")
    assert run(*base, "--num-micro-batches", "4", "--blocks-per-stage", "2,1,0,1") == (2, "usage")
    assert run(*base, "--num-micro-batches", "1") == (2, "")
    assert run(*base, "--num-micro-batches", "4", "--schedule", "zbv", "--blocks-per-stage", "1,1,1,1") == (0, "")
    text = capsys.readouterr().out
    assert "Schedule zbv, 4 micro-batches" in text and "Pipeline stages: " in text
    stages = [line.split("  ")[0] for line in text.splitlines() if re.match("[0-9], [0-9]", line)]
    assert stages == ["0, 3", "1, 2"]
    assert "embedding, blocks.0" in text and "blocks.3, norm, output" in text


def test_dtype_optimizer_and_recomputation(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--preset", "olmoe", "--num-layers", "1", "--mesh", "data=2", "--rules", "ep-tp", "--vocab-size", "64")
    texts = []
    for options in ((), ("--recompute", "blocks", "--optimizer", "muon", "--dtype", "float32")):
        assert run(*base, *options) == (0, "")
        texts.append(capsys.readouterr().out)
    usual, recomputed = (float(re.findall(r"^activations +([\d.]+) GiB$", text, re.MULTILINE)[0]) for text in texts)
    assert recomputed < usual  # although in float32
    assert "state of muon" in texts[1] and "Parameters are float32, " in texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--preset mixtra --mesh a=2", "there is no model 'mixtra'; the nearest are 'mixtral'"),
        ("--mesh a:2", "a mesh must read like fsdp=2,expert=4, got 'a:2'"),
        ("--mesh fsdp=-1", "error: --world-size must be given for a mesh with a -1: fsdp=-1"),
        ("--mesh fsdp=3 --world-size 8", "make 3 ranks, and the world has 8"),
        (
            "--mesh fdsp=2",
            "no rule has the axis 'fdsp' of Mesh(fdsp=2); the nearest are 'fsdp'; choose axes of the rules",
        ),
        ("--mesh fsdp=2 --rules ep", "there is no preset 'ep', only cp-as-ep, "),
        ("--mesh fsdp=2 --rules no/such.yaml", "no/such.yaml: No such file"),
        ("--mesh fsdp=2 --batch-size 3", "error: --batch-size (3) must be divisible by fsdp=2"),
        ("--mesh fsdp=2 --num-dense-layers 99", "error: --num-dense-layers (99) must not exceed --num-layers"),
        ("--mesh fsdp=2 --num-heads 7", "must divide --num-heads (7)"),
        (
            "--preset olmoe --num-layers 1 --mesh fsdp=2 --imbalance 2",
            "error: --imbalance must be at most the number of ranks that share the experts (1), got 2.0",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--preset", "mixtral", *arguments.split())[0] == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert message in said.err


def test_names_without_effect_can_be_meant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run("--preset", "mixtral", "--num-layers", "1", "--mesh", "node=2", "--allow-unused") == (0, "")
    text = capsys.readouterr().out
    assert "2 ranks: node=2. Rules: default." in text
    assert max(map(len, text.splitlines())) == 80


def test_dispatch_is_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ("--preset", "mixtral", "--num-layers", "1", "--mesh", "expert=8", "--rules", "ep-as-dp")
    assert run(*mesh, "--dispatch", "ring_of_experts", "--num-chunks", "4") == (0, "")
    said = capsys.readouterr().out
    assert re.search("ring_of_experts +given; auto takes ragged_all_to_all: top_k .* over expert +1 of 8", said)
    assert re.search("expert ids, forward +all-gather +expert +4 ", said)
    assert run(*mesh, "--dispatch", "ring") == (2, "usage")


def test_numbers_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--preset", "mixtral", "--mesh", "fsdp=2", "--batch-size", "0") == (2, "usage")
    assert "argument --batch-size: must be at least 1, got 0" in capsys.readouterr().err


def test_info_describes_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["torch"] == torch.__version__ and said["threads"] == str(torch.get_num_threads())
    assert said["core:isa"] == build_info()["isa"] in said["core:supported_isas"]
    assert Path(said["core"]).is_file()
    assert said["processor"] != "unknown"
    assert said["threads:wait"] == waiting_of_this_process(torch.get_num_threads())


def test_a_closed_pipe_is_not_an_error() -> None:
    """As of `head`, which ends before everything is written."""
    done = programs.run(["bash", "-c", f"{sys.executable} -m maxmoe info | true; exit ${{PIPESTATUS[0]}}"])
    assert (done.returncode, done.stderr) == (0, "")


OWN = """
import torch, maxmoe
def build():
    moe = maxmoe.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), maxmoe.MoEFeedForward(moe)).to(torch.float16)
def short():
    model = build()
    model.declaration = maxmoe.parallel.Declaration(max_sequence_length=8)
    return model
nothing = lambda: None
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "own_training.py").write_text("import os\nraise RuntimeError('RANK expected')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    return "own_models"


def test_a_model_of_ones_own(own_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = ("--batch-size", "8", "--sequence-length", "8")
    mesh = ("--mesh", "fsdp=2,expert=2", "--rules", "ep-as-dp", *step)
    texts = {}
    for command in ("explain", "estimate"):
        assert main([command, f"{own_module}:build", *mesh]) == 0
        texts[command] = capsys.readouterr().out
    assert texts["estimate"].startswith("own_models:build: a Sequential of 1,872 parameters.")
    dtypes = "Parameters are float16, gradients float16, moments float32, master weights float32."
    assert dtypes in texts["estimate"] and "logical names" not in texts["estimate"]
    assert "logical names" in texts["explain"] and texts["explain"].endswith(texts["estimate"].split("\n\n", 1)[1])
    plan = ("plan", f"{own_module}:build", "--world-size", "2", *step)
    assert main([*plan, "--rules", "ep-as-dp", "--memory", "200GiB", "--master-dtype", "float32"]) == 0
    text = capsys.readouterr().out
    assert "own_models:build" in text and "To run plan 1:" in text and "maxmoe.parallelize(model, Mesh({" in text
    assert main([*plan, "--device", "h10"]) == 2
    assert "there is no device 'h10'; the nearest are 'h100'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("own_models",), "a model must read like module:function, got 'own_models'"),
        (("own_models:buid",), "own_models has no function 'buid'"),
        (("no_models:build",), "there is no module 'no_models' to import from this folder"),
        (
            ("own_training:build",),
            "importing own_training fails in line 2 with RuntimeError: RANK expected. If it trains",
        ),
        (("own_models:nothing",), "own_models:nothing must return a torch.nn.Module, got NoneType"),
        (("own_models:build", "--preset", "olmoe"), "give either module:function or --preset"),
        ((), "give either module:function or --preset, got neither"),
        (
            ("own_models:short",),
            "error: --sequence-length (4096) must not exceed max_sequence_length (8) of Sequential",
        ),
        (("own_models:build", "--num-layers", "2"), "--num-layers needs --preset"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_models_that_are_refused(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments, "--mesh", "fsdp=2"]) == 2
    assert message in capsys.readouterr().err
