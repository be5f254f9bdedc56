"""Training of the adapters of one model, and checkpoints that contain nothing else."""

import math
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from finetuning.token_text import TokenText
from finetuning.training import train_step
from pretraining import InputError, checkpoint
from pretraining.corpus import TrainingSequences
from pretraining.trainer import learning_rate

DEFAULT_STEPS = 200
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


class AdapterTraining:
    """State and steps of a run.

    Args:
        options: options of the command line.
        model: model with adapters; all other parameters are frozen.
        text: training text.
    """

    def __init__(self, options: Namespace, model: PeftModel, text: TokenText) -> None:
        self.options, self.model, self.text = options, model, text
        self.steps = options.steps or DEFAULT_STEPS
        self.losses: list[float] = []
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.num_trained = sum(parameter.numel() for parameter in trained)
        self.optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
        self.sequences = TrainingSequences(
            text.tokens, sequence_length=options.sequence_length, batch_size=options.batch_size, seed=options.seed
        )
        self.checkpoint = Path(os.path.realpath(options.out / "checkpoint"))  # a symbolic link is kept

    @property
    def step(self) -> int:
        """Number of steps done."""
        return len(self.losses)

    def train_step(self) -> float:
        """Take a step and return its loss in nats per token.

        Raises:
            InputError: if the loss is not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.options.learning_rate)
        try:
            loss = train_step(self.model, self.optimizer, self.sequences.batch(self.step)[0])
        except ValueError as error:  # NaN logits of the router, which occur after the first step only
            if not self.step:
                raise
            raise self._diverged(str(error)) from error
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}")
        self.losses.append(loss)
        return loss

    def _diverged(self, what: str) -> InputError:
        return InputError(f"step {self.step}: {what}, try a smaller --learning-rate")

    def configuration(self) -> dict[str, Any]:
        """Options that must be equal when a run is resumed, and the fingerprint of the text."""
        free = ("data", "out", "resume", "steps", "save_every", "experts", "threads")
        chosen = {name: value for name, value in vars(self.options).items() if name not in free}
        return {**chosen, "checkpoint": str(chosen["checkpoint"]), "data": self.text.fingerprint}

    def state(self) -> dict[str, Any]:
        """Return the tensors of the checkpoint: adapters and the state of their optimizer."""
        adapters, optimizer = get_state_dict(self.model, self.optimizer, options=_TRAINED)
        return {"adapters": adapters, "optimizer": optimizer["state"]}

    def save(self) -> None:
        """Save the checkpoint."""
        self.optimizer.zero_grad()  # frees memory for the copies that are written
        training = {
            "configuration": self.configuration(),
            "steps": self.steps,
            "training": self.losses,
            "held_out": [],
        }
        checkpoint.save(self.checkpoint, self.state(), training)

    def resume(self) -> None:
        """Load the checkpoint. --steps replaces its number of steps."""
        state = self.state()
        training = checkpoint.load(self.checkpoint, self.configuration(), state)
        _, optimizer = get_state_dict(self.model, self.optimizer, options=_TRAINED)
        optimizer["state"] = state["optimizer"]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["adapters"],
            optim_state_dict=optimizer,
            options=_TRAINED,
        )
        self.losses = training["training"]
        self.steps = self.options.steps or training["steps"]
        if self.steps < self.step:
            raise InputError(f"--steps {self.steps}: the run in {self.options.out} has done {self.step} already")
