"""Callback of Lightning that records the load of the experts. `pip install lightning` brings the library."""

from typing import Any

import lightning

from maxmoe.expert_load import LoadHistory, StatsAccumulator


class LoadCallback(lightning.Callback):  # type: ignore[misc]
    """Callback of Lightning that records the load of the experts in every optimizer step.

    It has a `StatsAccumulator`, whose `update` it calls after each optimizer step, so that correction biases move. All
    loggers of the trainer get the values of all steps, every `log_every_n_steps`. The steps of several optimizers after
    one batch are one step here, and several in ``trainer.global_step``. A training resumed from a checkpoint without
    this callback begins with step 1::

        callback = maxmoe.integrations.lightning.LoadCallback()
        lightning.Trainer(callbacks=[callback]).fit(model, data)
        callback.history.write_csv("load.csv")

    Attributes:
        history: record of the steps of the current or last training, on every process.

    Raises:
        ValueError: when the training begins, if the model has no `MoE` or `MoEFeedForward` layers.
    """

    def __init__(self) -> None:
        self.history = LoadHistory()
        self._written = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the record, which Lightning saves in its checkpoint."""
        return self.history.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the record of a checkpoint."""
        self.history.load_state_dict(state_dict)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin a record, or continue the record of the checkpoint if the training is resumed."""
        if trainer.global_step == 0:
            self.history = LoadHistory()
        self._accumulator = StatsAccumulator(pl_module)
        self._written, self._global_step = self.history.num_steps, trainer.global_step

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_args: Any, **_kwargs: Any
    ) -> None:
        """Add the statistics of the step, unless the batch was a micro-batch that is not the last one of its step."""
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self.history.add(self._accumulator.update().layers)
        if self.history.num_steps - self._written >= trainer.log_every_n_steps:
            self._write(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write the steps since the last log."""
        self._write(trainer)

    def _write(self, trainer: lightning.Trainer) -> None:
        if trainer.is_global_zero:
            for step, values in self.history.scalars(after=self._written).items():
                for logger in trainer.loggers:
                    logger.log_metrics(values, step)
        self._written = self.history.num_steps
