"""The training of one model with one experts implementation, measured."""

import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from finetuning.models import small_model
from pretraining import InputError
from pretraining.corpus import TrainingSequences
from pretraining.trainer import learning_rate

MIB = 2**20


@dataclass(frozen=True)
class Run:
    """What was measured.

    Args:
        implementation: of the experts.
        losses: of every step, nats per byte.
        tokens_per_second: in the median step.
        peak: bytes of memory above the state before the model, at most.
    """

    implementation: str
    losses: list[float]
    tokens_per_second: float
    peak: int


def train(options: Namespace, text: Tensor, implementation: str) -> Run:
    """Take all steps. The memory is that of the process: give every run its own.

    Args:
        options: the command line.
        text: ``(N,)`` uint8.
        implementation: "eager", "grouped_mm" or "maxmoe".

    Returns:
        What was measured.

    Raises:
        InputError: if there is no such model or it does not train.
    """
    torch.set_num_threads(options.threads)
    Path("/proc/self/clear_refs").write_text("5")  # resets the highest mark
    before = status("RssAnon")
    model = small_model(options, implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
    sequences = TrainingSequences(
        text, sequence_length=options.sequence_length, batch_size=options.batch_size, seed=options.seed
    )
    losses, seconds = [], []
    num_tokens = options.batch_size * options.sequence_length
    bar = {"unit": " tokens", "unit_scale": True, "dynamic_ncols": True, "mininterval": 0.5}
    with tqdm(total=options.steps * num_tokens, desc=implementation, **bar) as progress:
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options.steps, options.learning_rate)
            start = time.perf_counter()
            losses.append(train_step(model, optimizer, sequences.batch(step)[0]))
            seconds.append(time.perf_counter() - start)
            if not losses[-1] < float("inf"):
                raise InputError(
                    f"{implementation}, step {step}: the loss is {losses[-1]}, try a smaller --learning-rate"
                )
            progress.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            progress.update(num_tokens)
    peak = status("VmHWM") - status("RssFile") - status("RssShmem") - before  # without the code that was read
    return Run(implementation, losses, num_tokens / median(seconds), peak)


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Take one step and return its loss, with the balance loss where the family has one."""
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
