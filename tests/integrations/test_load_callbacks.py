"""The callbacks of transformers.Trainer and Lightning record the same values as a StatsAccumulator in a plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from integrations.trainers import TOKENS, fit_with_lightning, transformers_trainer
from maxmoe import StatsAccumulator
from maxmoe.expert_load import LoadHistory
from maxmoe.integrations.transformers import LoadCallback, replace_moe_blocks
from support.small_models import model_of

STEPS, MICRO_BATCHES = 5, 2
OPTIONS = {"gradient_accumulation_steps": MICRO_BATCHES, "max_grad_norm": 0.0, "weight_decay": 0.0, "logging_steps": 2}

# Of these libraries about themselves and about torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


def model_with_layers() -> nn.Module:
    torch.manual_seed(0)
    model = model_of("qwen3_moe", router_aux_loss_coef=0.0).float()
    replace_moe_blocks(model)
    return model


def by_hand() -> LoadHistory:
    """Record of a loop that clips no gradient and keeps the learning rate."""
    model, history = model_with_layers(), LoadHistory()
    accumulator, optimizer = StatsAccumulator(model), torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for index, tokens in enumerate(TOKENS.split(2)):
        (model(input_ids=tokens, labels=tokens).loss / MICRO_BATCHES).backward()
        if index % MICRO_BATCHES == MICRO_BATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
            history.add(accumulator.update().layers)
    return history


def assert_same(history: LoadHistory, expected: LoadHistory) -> None:
    assert len(history.rows()) == STEPS * len(expected.tokens_per_expert) and history.num_steps == STEPS
    for row, other in zip(history.rows(), expected.rows(), strict=True):
        assert row.layer.endswith(other.layer)  # a LightningModule has the model as an attribute
        assert row.step == other.step and row[2:] == pytest.approx(other[2:], rel=1e-4)


def assert_continues(second: LoadHistory, first: LoadHistory, num_steps: int) -> None:
    assert second.rows()[: len(first.rows())] == first.rows()
    assert {row.step for row in second.rows()} == {*range(1, num_steps + 1)}


def test_transformers_trainer(tmp_path: Path) -> None:
    """A resumed training continues the record of its checkpoint, or starts a record at its step without one."""
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
    saving = {"save_strategy": "steps", "save_steps": 2, "save_only_model": False}

    def trained(callback: LoadCallback, folder: Path, max_steps: int, resume: Any = None) -> None:
        trainer = transformers_trainer(model_with_layers(), folder, callback, max_steps=max_steps, **saving, **OPTIONS)
        trainer.train(resume_from_checkpoint=resume)

    first, second = LoadCallback(), LoadCallback()
    trained(first, tmp_path, 2)
    trained(second, tmp_path, STEPS, True)
    assert {row.step for row in first.history.rows()} == {1, 2}
    assert_continues(second.history, first.history, STEPS)
    assert_same(second.history, by_hand())
    moved = (tmp_path / "checkpoint-2").rename(tmp_path / "moved")
    trained(second, tmp_path / "new", STEPS, str(moved))
    assert {row.step for row in second.history.rows()} == {3, 4, 5}


def test_a_model_without_layers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
    trainer = transformers_trainer(model_of("qwen3_moe").float(), tmp_path, LoadCallback(), max_steps=1)
    with pytest.raises(ValueError, match="must have layers of type MoE, got none"):
        trainer.train()


def modules_of_lightning(lightning: Any) -> tuple[type, type]:
    """Modules with one optimizer, and with two that step together."""

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model_with_layers()

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)

    class TwoOptimizers(Module):
        automatic_optimization = False

        def training_step(self, tokens: Tensor, index: int) -> None:
            self.manual_backward(super().training_step(tokens, index))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            router = [p for name, p in self.named_parameters() if "gate.weight" in name]
            others = [p for name, p in self.named_parameters() if "gate.weight" not in name]
            return torch.optim.SGD(router, lr=0.1), torch.optim.SGD(others, lr=0.1)

    return Module, TwoOptimizers


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="of the extra 'trainers'")
    from lightning.pytorch.loggers import CSVLogger

    from maxmoe.integrations.lightning import LoadCallback

    one_optimizer, two_optimizers = modules_of_lightning(lightning)
    logger, checkpoint = CSVLogger(tmp_path), tmp_path / "checkpoint.pt"

    def trained(callback: Any, max_steps: int, kind: type = one_optimizer, ckpt_path: Path | None = None) -> Any:
        options = {"logger": logger, "log_every_n_steps": 2, "callbacks": [callback], "max_steps": max_steps}
        if kind is one_optimizer:
            options["accumulate_grad_batches"] = MICRO_BATCHES
        return fit_with_lightning(kind(), tmp_path, ckpt_path, **options)

    callback = LoadCallback()
    trained(callback, STEPS)
    assert_same(callback.history, by_hand())
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + STEPS and "load_max_over_mean/model.model.layers.0.mlp" in rows[0]
    # A resumed training continues the record of its checkpoint.
    first, second = LoadCallback(), LoadCallback()
    trained(first, 2).save_checkpoint(checkpoint)
    trained(second, STEPS, ckpt_path=checkpoint)
    assert_continues(second.history, first.history, STEPS)
    # Lightning counts the steps of two optimizers twice.
    trained(first, 8, two_optimizers).save_checkpoint(checkpoint)
    trained(second, 16, two_optimizers, checkpoint)
    assert {row.step for row in first.history.rows()} == {1, 2, 3, 4}
    assert_continues(second.history, first.history, 8)
