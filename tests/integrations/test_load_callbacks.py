"""The callbacks of transformers.Trainer and Lightning record the same values as a StatsAccumulator in a plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe import StatsAccumulator
from maxmoe.expert_load import LoadHistory
from maxmoe.integrations.transformers import replace_moe_blocks
from support.small_models import model_of

STEPS, MICRO_BATCHES = 5, 2
TOKENS = torch.randint(3, 32, (20, 12), generator=torch.Generator().manual_seed(0))

pytestmark = [
    # Of these libraries about themselves and about torch.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


def model_with_layers() -> nn.Module:
    torch.manual_seed(0)
    model: Any = model_of("qwen3_moe", router_aux_loss_coef=0.0).float()
    replace_moe_blocks(model)
    return model  # type: ignore[no-any-return]


def by_hand(num_steps: int = STEPS) -> LoadHistory:
    """Record of a loop that clips no gradient and keeps the learning rate."""
    model, history = model_with_layers(), LoadHistory()
    accumulator, optimizer = StatsAccumulator(model), torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for index, tokens in enumerate(TOKENS.split(2)[: num_steps * MICRO_BATCHES]):
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


class Trainers:
    """Runs `transformers.Trainer` without shuffling."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = {
            "output_dir": str(folder),
            "use_cpu": True,
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "weight_decay": 0.0,
            "logging_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **options,
        }

    def run(self, model: nn.Module, *callbacks: Any, **arguments: Any) -> None:
        from torch.utils.data import SequentialSampler
        from transformers import Trainer, TrainingArguments

        class InOrder(Trainer):
            def _get_train_sampler(self, train_dataset: Any = None) -> Any:
                return SequentialSampler(train_dataset)

        data = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
        options = TrainingArguments(**self.options)
        InOrder(model, options, train_dataset=data, callbacks=[*callbacks]).train(**arguments)


def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
    from maxmoe.integrations.transformers import LoadCallback

    callback = LoadCallback()
    Trainers(tmp_path).run(model_with_layers(), callback)
    assert_same(callback.history, by_hand())


def test_transformers_trainer_resumed(tmp_path: Path) -> None:
    """A resumed training continues the record of its checkpoint, or starts a record at its step without one."""
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
    from maxmoe.integrations.transformers import LoadCallback

    first, second = LoadCallback(), LoadCallback()
    saving = {"save_strategy": "steps", "save_steps": 2, "save_only_model": False}
    Trainers(tmp_path, **saving, max_steps=2).run(model_with_layers(), first)
    Trainers(tmp_path, **saving).run(model_with_layers(), second, resume_from_checkpoint=True)
    assert {row.step for row in first.history.rows()} == {1, 2}
    assert second.history.rows()[: len(first.history.rows())] == first.history.rows()
    assert {row.step for row in second.history.rows()} == {1, 2, 3, 4, 5}
    moved = (tmp_path / "checkpoint-2").rename(tmp_path / "moved")
    Trainers(tmp_path / "new", **saving).run(model_with_layers(), second, resume_from_checkpoint=str(moved))
    assert {row.step for row in second.history.rows()} == {3, 4, 5}


def test_a_model_without_layers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs it")
    from maxmoe.integrations.transformers import LoadCallback

    with pytest.raises(ValueError, match="must have layers of type MoE, got none"):
        Trainers(tmp_path).run(model_of("qwen3_moe").float(), LoadCallback())


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
    callback, logger = LoadCallback(), CSVLogger(tmp_path)

    def trained(callback: Any, max_steps: int, kind: type = one_optimizer, **options: Any) -> Any:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=max_steps,
            accumulate_grad_batches=MICRO_BATCHES if kind is one_optimizer else 1,
            log_every_n_steps=2,
            logger=logger,
            callbacks=[callback],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(kind(), torch.utils.data.DataLoader(TOKENS, batch_size=2), **options)
        return trainer

    trained(callback, STEPS)
    assert_same(callback.history, by_hand())
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + STEPS and "load_max_over_mean/model.model.layers.0.mlp" in rows[0]
    # A resumed training continues the record of its checkpoint.
    first, second = LoadCallback(), LoadCallback()
    trained(first, 2).save_checkpoint(tmp_path / "checkpoint.pt")
    trained(second, STEPS, ckpt_path=tmp_path / "checkpoint.pt")
    assert second.history.rows()[: len(first.history.rows())] == first.history.rows()
    assert {row.step for row in second.history.rows()} == {1, 2, 3, 4, 5}
    # Lightning counts the steps of two optimizers twice.
    trained(first, 8, two_optimizers).save_checkpoint(tmp_path / "checkpoint.pt")
    trained(second, 16, two_optimizers, ckpt_path=tmp_path / "checkpoint.pt")
    assert {row.step for row in first.history.rows()} == {1, 2, 3, 4}
    assert {row.step for row in second.history.rows()} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert second.history.rows()[: len(first.history.rows())] == first.history.rows()
