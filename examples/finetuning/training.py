"""Trains one model with one experts implementation and measures it."""

import math
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from finetuning.models import small_model, with_adapters
from pretraining import InputError
from pretraining.corpus import TrainingSequences
from pretraining.trainer import learning_rate

MIB = 2**20


@dataclass(frozen=True)
class Run:
    """Measurements of a run.

    Args:
        implementation: experts implementation.
        losses: loss of each step in nats per byte.
        tokens_per_second: tokens per second in the median step.
        peak: peak memory in bytes, without the memory before the model was built.
        num_trained: number of trained parameters.
    """

    implementation: str
    losses: list[float]
    tokens_per_second: float
    peak: int
    num_trained: int


class Training:
    """Model, optimizer and data of a run. The memory is measured per process, so each run needs its own process.

    Args:
        options: options of the command line.
        text: ``(N,)`` uint8, training text.
        implementation: "eager", "grouped_mm" or "maxmoe".

    Raises:
        InputError: if the model cannot be built.
    """

    def __init__(self, options: Namespace, text: Tensor, implementation: str) -> None:
        torch.set_num_threads(options.threads)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory of the process
        self.before = status("RssAnon")
        self.options, self.implementation = options, implementation
        model = small_model(options, implementation)
        self.model = with_adapters(model, options.seed) if options.lora else model
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
        self.sequences = TrainingSequences(
            text, sequence_length=options.sequence_length, batch_size=options.batch_size, seed=options.seed
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> float:
        """Take a step and return its loss.

        Raises:
            InputError: if the loss is not finite.
        """
        step = len(self.losses)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.options.steps, self.options.learning_rate)
        tokens = self.sequences.batch(step)[0]
        start = time.perf_counter()
        try:
            loss = train_step(self.model, self.optimizer, tokens)
        except ValueError as error:  # the router refuses NaN logits, which occur after the first step only
            if not step:
                raise
            raise self.diverged(str(error)) from error
        self.seconds.append(time.perf_counter() - start)
        if not math.isfinite(loss):
            raise self.diverged(f"the loss is {loss}")
        self.losses.append(loss)
        return loss

    def diverged(self, what: str) -> InputError:
        """Return the error for a run that has diverged."""
        where = f"{self.implementation}, step {len(self.losses)}"
        return InputError(f"{where}: {what}, try a smaller --learning-rate")

    def run(self) -> Run:
        """Return the measurements."""
        num_tokens = self.options.batch_size * self.options.sequence_length
        files = status("RssFile") + status("RssShmem")  # pages of shared libraries
        peak = status("VmHWM") - files - self.before
        num_trained = sum(parameter.numel() for parameter in self.trained)
        return Run(self.implementation, self.losses, num_tokens / median(self.seconds), peak, num_trained)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Take one optimizer step; return the loss, which includes the load balance loss if the family has one."""
    balance = {"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}
    loss = model(input_ids=tokens, labels=tokens, use_cache=False, **balance).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def status(field: str) -> int:
    """Read a line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024
