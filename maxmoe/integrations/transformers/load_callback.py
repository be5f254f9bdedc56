"""Callback of `transformers.Trainer` that records the load of the experts."""

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from maxmoe.expert_load import LoadHistory, StatsAccumulator
from maxmoe.expert_load.history import Run, SummaryWriter


class LoadCallback(TrainerCallback):
    """Callback of `transformers.Trainer` that records the load of the experts in every optimizer step.

    It has a `StatsAccumulator`, whose `update` it calls after each optimizer step, so that correction biases move. The
    record is saved in the folders of the checkpoints in `output_dir`, and a training resumed from one goes on with it::

        callback = maxmoe.integrations.transformers.LoadCallback()
        Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
        callback.history.write_csv("load.csv")

    Args:
        tensorboard: a `torch.utils.tensorboard.SummaryWriter`, to which the first process writes the values of all
            steps whenever the trainer logs; None for none.
        wandb: the run that `wandb.init` returns, to which they are written likewise; None for none.

    Attributes:
        history: record of the steps of the current or last training, on every process.

    Raises:
        ValueError: when the training begins, if the model has no `MoE` or `MoEFeedForward` layers.
    """

    def __init__(self, *, tensorboard: SummaryWriter | None = None, wandb: Run | None = None) -> None:
        self.history = LoadHistory()
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._written = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a record, or continue the record of the checkpoint if the training is resumed."""
        self.history, saved = LoadHistory(num_steps=state.global_step), _saved_history(args, state)
        if state.global_step and saved.exists():
            self.history.load_state_dict(torch.load(saved))
        self._accumulator = StatsAccumulator(kwargs["model"])
        self._written = state.global_step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the statistics of the step."""
        self.history.add(self._accumulator.update().layers)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the record in the folder of the checkpoint."""
        file = _saved_history(args, state)
        if state.is_world_process_zero and file.parent.is_dir():
            torch.save(self.history.state_dict(), file)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the steps since the last log; the trainer logs at its end, too."""
        if not state.is_world_process_zero or self._written == self.history.num_steps:
            return
        if self._tensorboard is not None:
            self.history.write_tensorboard(self._tensorboard, after=self._written)
        if self._wandb is not None:
            self.history.write_wandb(self._wandb, after=self._written)
        self._written = self.history.num_steps


def _saved_history(args: Any, state: Any) -> Path:
    """Return the file of the record in the folder in which the trainer saves the checkpoint of the current step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "load_history.pt"
