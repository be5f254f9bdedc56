"""`examples/finetune_transformers.py`: whole runs, equal losses, and one line for mistakes of users."""

from argparse import Namespace

import pytest
import torch

from examples.pretrain_run import InputError

pytest.importorskip("transformers")

import finetune_transformers
from finetuning.training import Run, Training

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


@pytest.mark.parametrize(
    ("family", "has_adapters"), [("qwen3_moe", False), ("llama4_text", False), ("mixtral", True), ("gpt_oss", True)]
)
def test_all_implementations_have_the_same_losses(family: str, has_adapters: bool) -> None:
    wanted = options("--family", family, *(["--lora", "--learning-rate", "0.01"] if has_adapters else []))
    runs = [train(wanted, text(), name) for name in finetune_transformers.IMPLEMENTATIONS]
    assert [run.implementation for run in runs] == ["eager", "grouped_mm", "maxmoe"]
    for run in runs:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-5)
        if has_adapters:  # layers, experts, rank: gate and up, then down
            assert run.num_trained == 2 * 4 * 8 * ((16 + 16) + (8 + 16))
            assert run.losses[-1] < run.losses[0] - 1e-3


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
