"""Trainers of transformers and of Lightning, which take sequences of tokens in their order."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

TOKENS = torch.randint(3, 32, (20, 12), generator=torch.Generator().manual_seed(0))


def trainer_options(folder: Path, **options: Any) -> dict[str, Any]:
    """Arguments of `transformers.TrainingArguments`."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }


def transformers_trainer(model: nn.Module, folder: Path, *callbacks: Any, **options: Any) -> Any:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset)

    data = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
    arguments = TrainingArguments(**trainer_options(folder, **options))
    return InOrder(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[*callbacks])


def fit_with_lightning(module: Any, folder: Path, ckpt_path: Path | None = None, **options: Any) -> Any:
    """Train, and return the trainer."""
    import lightning

    trainer = lightning.Trainer(
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, torch.utils.data.DataLoader(TOKENS, batch_size=2), ckpt_path=ckpt_path)
    return trainer
