"""The steps of `examples/pretrain.py`: batches, load, learning rate, weight decay."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from pretraining import corpus, trainer
from support.pretrain_run import OPTIONS


def test_a_step_reads_its_batch_and_records_its_load(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 250
    run = trainer.Trainer(Namespace(**{**vars(OPTIONS), "steps": steps}), corpus.load_corpus([str(text)], 16))
    batch, read = run.sequences.batch, []
    monkeypatch.setattr(run.sequences, "batch", lambda step: read.append(step) or batch(step))
    biases = [torch.zeros(4) for _ in run.model.moe_layers()]
    total = torch.zeros(2, 4, dtype=torch.int64)
    for step in range(6):
        counts = torch.stack([layer.tokens_per_expert for layer in run.train_step().layers.values()])
        total += counts
        assert run.optimizer.param_groups[0]["lr"] == trainer.learning_rate(step, steps, 0.01)
        for layer, bias, count in zip(run.model.moe_layers(), biases, counts.float(), strict=True):
            bias += layer.config.correction_bias_update_rate * (count.mean() - count).sign()
            torch.testing.assert_close(layer.router.score_correction_bias, bias)
    assert read == list(range(6))
    load = run.state()["load"]
    assert torch.equal(load.sum(0), total)
    assert load.sum((1, 2)).tolist() == [192] * 6 + [0] * 94


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [trainer.learning_rate(step, 200, 1.0) for step in range(200)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=1e-3)
    assert trainer.learning_rate(0, 1, 1.0) == 1.0


def test_decay_is_for_matrices_only() -> None:
    model = trainer.build_model(OPTIONS)
    decayed, others = trainer.build_optimizer(model, OPTIONS).param_groups
    assert all(parameter.ndim >= 2 for parameter in decayed["params"]) and decayed["weight_decay"] > 0
    assert all(parameter.ndim < 2 for parameter in others["params"]) and others["weight_decay"] == 0
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_muon_is_for_the_matrices_of_blocks() -> None:
    """Other parameters have the options of a run with AdamW alone, including weight decay."""
    model = trainer.build_model(OPTIONS)
    optimizer = trainer.build_optimizer(model, Namespace(**{**vars(OPTIONS), "optimizer": "muon"}))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}
    assert chosen.keys() == set(names.values())
    for name, parameter in model.named_parameters():
        group, is_adamw = chosen[name], parameter.ndim < 2 or not name.startswith("blocks.") or "router" in name
        assert group["algorithm"] == ("adamw" if is_adamw else "muon"), name
        assert group["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0.0) and group["lr"] == 0.01, name
        assert group.get("betas", (0.9, 0.95)) == (0.9, 0.95)
