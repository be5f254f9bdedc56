"""`examples/upcycle.py`: whole runs, equal models at the start, and one line for mistakes."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from examples.pretrain_run import InputError

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel

import upcycle
from finetuning import upcycling

TINY = [
    *("--hidden-size", "16", "--intermediate-size", "24", "--num-layers", "1", "--batch-size", "2"),
    *("--sequence-length", "16", "--dense-steps", "3", "--steps", "4", "--threads", "1"),
]


def options(*arguments: str) -> Namespace:
    return upcycle.parse_options([*TINY, *arguments])


def test_a_run_prints_a_table_and_leaves_a_picture(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--slices", "3", "--num-experts", "9", "--top-k", "3"]
    assert upcycle.run(options("--data", str(text), "--out", str(tmp_path), *sizes)) == 0
    printed = capsys.readouterr().out
    (apart,) = (float(line.split()[-1]) for line in printed.splitlines() if line.startswith("Logits of the MoE"))
    assert apart < 1e-6
    rows = {cells[0]: cells[1:] for line in printed.splitlines() if len(cells := line.split()) == 6}
    (total, *_), (moe_total, *_) = ([int(cell.replace(",", "")) for cell in row[:2]] for row in rows.values())
    router, block = 9 * 16, 3 * 16 * 24
    assert moe_total == total + router + 2 * block  # three virtual groups
    assert (tmp_path / "upcycle.png").exists()


def test_a_checkpoint_goes_on(text: Path, tmp_path: Path) -> None:
    """A checkpoint is not trained before the conversion, except with --dense-steps."""
    dense = upcycling.dense_model(options())
    dense.save_pretrained(tmp_path / "llama")
    parsed = upcycle.parse_options(["--checkpoint", str(tmp_path / "llama")])
    assert parsed.dense_steps == 0
    loaded = upcycling.dense_model(parsed)
    assert all(torch.equal(value, dense.state_dict()[name]) for name, value in loaded.state_dict().items())
    arguments = ["--checkpoint", str(tmp_path / "llama"), "--dense-steps", "0", "--data", str(text)]
    assert upcycle.run(options(*arguments, "--out", str(tmp_path / "out"))) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slices", "5"], "--slices 5 must divide the width of the dense blocks, 24"),
        (["--slices", "3"], r"num_experts \(16\) must be a multiple of the number of slices .* \(3\)"),
        (["--top-k", "17"], r"top_k \(17\) must not exceed num_experts \(16\)"),
        (["--hidden-size", "18"], "cannot make the dense model: .*18"),
        (["--checkpoint", "nowhere"], "--checkpoint nowhere: no such folder"),
        (["--learning-rate", "1e30"], r"(nan|NaN).*, try a smaller --learning-rate"),
    ],
)
def test_what_cannot_be_trained_is_named(arguments: list[str], message: str, text: Path, tmp_path: Path) -> None:
    wanted = options("--data", str(text), "--out", str(tmp_path / "out"), *arguments)
    with pytest.raises(InputError, match=message):
        upcycle.run(wanted)


def test_a_model_without_gated_blocks_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=256)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="GPT2LMHeadModel has no blocks with gate_proj, up_proj and down_proj"):
        upcycling.dense_model(options("--checkpoint", str(tmp_path)))
