"""`examples/finetune_transformers.py`: whole runs, equal losses, and one line for mistakes of users."""

import multiprocessing
from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from support.pretrain_run import InputError, words

pytest.importorskip("transformers")

import finetune_transformers
from finetuning import turns
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
    assert (out / "comparison.png").exists()


# The next test trains others.
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4_text"])
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


def test_it_learns() -> None:
    losses = train(options("--steps", "60", "--learning-rate", "0.01"), text(), "maxmoe").losses
    assert losses[0] > 5 and losses[-1] < 2.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "bert"], "--family bert: not a language model with experts; there are .*mixtral.*qwen3_moe"),
        (["--family", "gemma4_text"], "cannot make a small model of the family gemma4_text: .*head_dim"),
        (["--family", "deepseek_v3", "--num-layers", "1"], "the first 1 layers of the family deepseek_v3 have no"),
        (["--top-k", "5"], "cannot make a small model of the family mixtral: .*k"),
        (["--hidden-size", "100000", "--num-experts", "1000"], r"would have [\d,]+ parameters, at most"),
        (["--learning-rate", "1e30"], r"maxmoe, step \d: .*(nan|NaN).*, try a smaller --learning-rate"),
    ],
)
def test_what_cannot_be_trained_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(options(*arguments), text(), "maxmoe")


def test_a_large_batch_is_refused() -> None:
    message = "--batch-size 100000 with --sequence-length 16 makes 1,600,000 tokens a step, more than 1,048,576"
    with pytest.raises(InputError, match=message):
        finetune_transformers.run(options("--batch-size", "100000"))


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = words(tmp_path / "text")
    wanted = options("--data", str(data), "--out", str(tmp_path / "out"), "--family", "bert")
    assert exit_status("finetune_transformers", lambda: finetune_transformers.run(wanted)) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("finetune_transformers: --family bert: not a language")


def test_a_killed_process_is_named() -> None:
    with pytest.raises(InputError, match="maxmoe: the process was killed"):
        turns.train_in_turns(options(), Kill(), ("maxmoe",))  # type: ignore[arg-type]


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
