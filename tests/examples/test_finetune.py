"""`examples/finetune_transformers.py`: whole runs, equal losses, and one line for mistakes of users."""

import multiprocessing
from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from support.pretrain_run import InputError, words
from support.sampling import by_default

pytest.importorskip("transformers")

import finetune_transformers
from finetuning import figures, models, turns
from finetuning.training import Run, Training
from pretraining.command import exit_status

TINY = [
    *("--hidden-size", "16", "--intermediate-size", "8", "--num-layers", "2", "--num-experts", "4"),
    *("--batch-size", "2", "--sequence-length", "16", "--steps", "4", "--threads", "1"),
]


def options(*arguments: str) -> Namespace:
    return finetune_transformers.parse_options([*TINY, *arguments])


def text() -> torch.Tensor:
    return torch.tensor([*(b"one two three " * 20)], dtype=torch.uint8)


def train(options: Namespace, text: torch.Tensor, implementation: str) -> Run:
    """Take all steps, in this process."""
    training = Training(options, text, implementation)
    for _ in range(options.steps):
        training.step()
    return training.run()


@pytest.mark.slow
def test_a_run_prints_a_table_and_leaves_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = words(tmp_path / "text"), tmp_path / "out"
    with patch.object(finetune_transformers, "IMPLEMENTATIONS", ("eager", "maxmoe")):
        finetune_transformers.run(options("--data", str(data), "--out", str(out)))
    printed = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for line in printed.splitlines() if len(cells := line.split()) == 7}
    assert rows.keys() == {"eager", "maxmoe"}
    for loss, early, difference, tokens_per_second, peak, trained in rows.values():
        assert 4 < float(loss) < 7 and float(early) <= float(difference) < 1e-5
        assert float(tokens_per_second.replace(",", "")) > 0 and float(peak.replace(",", "")) > 0
        assert f"Model: mixtral, {trained} parameters" in printed
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")


# By default the families that the next test does not train.
@pytest.mark.parametrize(
    "family", by_default(["mixtral", "qwen3_moe", "gpt_oss", "llama4_text"], ["qwen3_moe", "llama4_text"])
)
def test_all_implementations_have_the_same_losses(family: str) -> None:
    runs = [train(options("--family", family), text(), name) for name in finetune_transformers.IMPLEMENTATIONS]
    assert [run.implementation for run in runs] == ["eager", "grouped_mm", "maxmoe"]
    for run in runs:
        assert len(run.losses) == 4
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_all_implementations_have_the_same_losses_with_adapters(family: str) -> None:
    wanted = options("--family", family, "--lora", "--learning-rate", "0.01")
    runs = [train(wanted, text(), name) for name in finetune_transformers.IMPLEMENTATIONS]
    for run in runs:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)
        assert run.num_trained == 2 * 4 * 8 * ((16 + 16) + (8 + 16))  # layers, experts, rank: gate and up, then down
    assert runs[0].losses[-1] < runs[0].losses[0] - 1e-3


def test_only_the_adapters_are_trained() -> None:
    training = Training(options("--lora"), text(), "maxmoe")
    before = {name: parameter.clone() for name, parameter in training.model.named_parameters()}
    for _ in range(2):
        training.step()
    changed = {
        name for name, parameter in training.model.named_parameters() if not torch.equal(parameter, before[name])
    }
    assert changed == {name for name in before if "lora_" in name}


def test_it_learns() -> None:
    losses = train(options("--steps", "60", "--learning-rate", "0.01"), text(), "maxmoe").losses
    assert losses[0] > 5 and losses[-1] < 2.5


def test_the_balance_loss_is_part_of_the_loss() -> None:
    """Mixtral's balance loss, with the weight in its config."""
    wanted = options()
    with patch.object(models, "small_config", lambda *_: changed(router_aux_loss_coef=10.0)):
        weighty = train(wanted, text(), "maxmoe").losses[0]
    assert weighty > train(wanted, text(), "maxmoe").losses[0] + 1


small_config = models.small_config


def changed(**fields: float) -> object:
    config = small_config("mixtral", options())
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_the_sizes_are_those_of_the_options() -> None:
    model = models.small_model(options("--top-k", "3"), "maxmoe")
    assert model.config._experts_implementation == "maxmoe"
    experts = model.model.layers[1].mlp.experts
    assert experts.gate_up_proj.shape == (4, 16, 16) and experts.down_proj.shape == (4, 16, 8)
    assert (model.config.num_experts_per_tok, len(model.model.layers), model.vocab_size) == (3, 2, 256)
    assert models.small_config("hunyuan_v1_moe", options("--top-k", "3")).moe_topk == 3  # each family has its own names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "bert"], "--family bert: not a language model with experts; there are .*mixtral.*qwen3_moe"),
        (["--family", "gemma4_text"], "cannot make a small model of the family gemma4_text: .*head_dim"),
        (["--family", "deepseek_v3", "--num-layers", "1"], "the first 1 layers of the family deepseek_v3 have no"),
        (["--top-k", "5"], "cannot make a small model of the family mixtral: .*k"),
        (["--learning-rate", "1e30"], r"maxmoe, step \d: .*(nan|NaN).*, try a smaller --learning-rate"),
    ],
)
def test_what_cannot_be_trained_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(options(*arguments), text(), "maxmoe")


def test_a_large_model_is_refused() -> None:
    with (
        patch.object(models, "LARGEST", 1000),
        pytest.raises(InputError, match=r"would have [\d,]+ parameters, at most 1,000"),
    ):
        models.small_model(options(), "maxmoe")


def test_a_large_batch_is_refused() -> None:
    message = "--batch-size 100000 with --sequence-length 16 makes 1,600,000 tokens a step, more than 1,048,576"
    with pytest.raises(InputError, match=message):
        finetune_transformers.run(options("--batch-size", "100000"))


def test_a_picture_that_cannot_be_written_is_named_before_the_work_begins(tmp_path: Path) -> None:
    (tmp_path / "comparison.png").mkdir()
    wanted = options("--data", str(words(tmp_path / "text")), "--out", str(tmp_path))
    with (
        patch.object(finetune_transformers, "train_in_turns", lambda *_: pytest.fail("it began")),
        pytest.raises(InputError, match=r"cannot write .*comparison.png: it is not a file"),
    ):
        finetune_transformers.run(wanted)


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = words(tmp_path / "text")
    wanted = options("--data", str(data), "--out", str(tmp_path / "out"), "--family", "bert")
    assert exit_status("finetune_transformers", lambda: finetune_transformers.run(wanted)) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("finetune_transformers: --family bert: not a language")


def test_a_killed_process_is_named() -> None:
    with pytest.raises(InputError, match="maxmoe: the process was killed"):
        turns.train_in_turns(options(), Kill(), ("maxmoe",))


class Kill:
    """Kills the process that it is sent to."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        (process,) = multiprocessing.active_children()
        process.kill()
        return Kill, ()


def test_the_implementations_take_turns() -> None:
    """The implementations take steps in turn; another one is first in every round."""
    taken = []

    class Recorded(turns.Apart):
        def __init__(self, pool: object, *arguments: object) -> None:
            self.implementation = arguments[-1]

        def step(self) -> float:
            taken.append(self.implementation)
            return 1.0

        def run(self) -> Run:
            return Run(self.implementation, [1.0], 1.0, 1, 1)

    with patch.object(turns, "Apart", Recorded):
        runs = turns.train_in_turns(options("--steps", "4"), text(), ("a", "b", "c"))
    assert "".join(taken) == "abc" + "bca" + "cab" + "abc"
    assert [run.implementation for run in runs] == ["a", "b", "c"]


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--sequence-length", "1"], ["--hidden-size", "8"]])
def test_numbers_that_are_too_small(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*arguments)
    assert f"argument {arguments[0]}: must be at least" in capsys.readouterr().err


def test_the_picture_shows_every_run(tmp_path: Path) -> None:
    runs = [Run(name, [5.0, 4.0], 1000.0, 2**20, 1) for name in finetune_transformers.IMPLEMENTATIONS]
    figures.comparison(tmp_path / "comparison.png", "mixtral", runs)
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


def test_the_picture_shows_the_difference_of_every_run(tmp_path: Path) -> None:
    """A run with another loss, and a run with equal losses."""
    sizes = []
    for difference in (0.0, 1e-3):
        runs = [Run("eager", [5.0, 4.0], 1.0, 1, 1), Run("maxmoe", [5.0, 4.0 + difference], 1.0, 1, 1)]
        with patch.object(figures, "save", lambda figure, path: sizes.append(figure.axes)):
            figures.comparison(tmp_path / "comparison.png", "mixtral", runs)
    for axes, difference in zip(sizes, (0.0, 1e-3), strict=True):
        shown = next(panel for panel in axes if "difference" in panel.get_title())
        (line,) = shown.lines
        assert line.get_label() == "maxmoe" and line.get_ydata() == pytest.approx([0, difference], abs=1e-12)
