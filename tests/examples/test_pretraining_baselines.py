"""The baselines of `examples/pretrain.py`, computed on the same bytes as its loss."""

import math
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pretraining import baselines, corpus, trainer
from support.pretrain_run import OPTIONS


def test_bigram_counts_pairs() -> None:
    training = torch.tensor([*b"abacab"], dtype=torch.uint8)
    pieces = torch.tensor([[*b"aba"], [*b"zac"]], dtype=torch.uint8)
    # a is followed by b twice and c once, b once by a, z by nothing; one more for each of the 256 bytes.
    probabilities = [3 / 259, 2 / 257, 1 / 256, 2 / 259]
    expected = -sum(math.log2(probability) for probability in probabilities) / 4
    assert baselines.bigram_bits_per_byte(training, pieces) == pytest.approx(expected, rel=1e-12)


def test_model_and_baselines_measure_the_same_bytes(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = corpus.load_corpus([str(text)], 16)
    content = b"".join(bytes(piece[1:]) for piece in loaded.held_out.tolist())
    assert baselines.zlib_bits_per_byte(loaded.held_out) == 8 * len(zlib.compress(content, 9)) / len(content)
    run = trainer.Trainer(OPTIONS, loaded)
    seen = []

    def evaluate(tokens: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
        real = targets[:, 0] >= 0  # the last batch is filled up
        tokens, targets = tokens[real], targets[real]
        seen.append(bytes(targets.flatten().tolist()))
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        return torch.tensor(2 * math.log(2)) * targets.numel() / num_tokens

    monkeypatch.setattr(run.computation, "evaluate", evaluate)
    assert run.evaluate() == pytest.approx(2)
    assert b"".join(seen) == content
