"""Trains one model with one strategy on the ranks of this machine and measures it."""

import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import maxmoe
from dispatching.ranks import run_ranks
from dispatching.sent_bytes import SentBytes
from dispatching.strategies import ONE_PROCESS, Strategy, model_config, strategies
from maxmoe.models import Decoder
from maxmoe.parallel import parameter_shardings, reset_parameters, token_group, token_sharding
from maxmoe.sharding import LogicalRules, Mesh
from pretraining.corpus import TrainingSequences

MIB = 2**20

BuildOptimizer = Callable[[Decoder, Namespace], torch.optim.Optimizer]


@dataclass(frozen=True)
class Run:
    """Measurements of a run, on one rank or combined over all.

    Args:
        strategy: strategy of the run.
        losses: loss of each step in nats per byte, without the load balance loss.
        loss_differences: difference of each step's loss from the loss of one process.
        gradient_differences: for each step, the largest difference of a gradient element from the gradient of one
            process, relative to the largest element of the same gradient; maximum over parameters and ranks.
        seconds: time of each step.
        peak: peak memory in bytes, without the memory before the model was built; maximum over ranks.
        sent: bytes that a rank sends in the first step, by kind of collective; mean over ranks.
    """

    strategy: Strategy
    losses: list[float]
    loss_differences: list[float]
    gradient_differences: list[float]
    seconds: list[float]
    peak: int
    sent: Counter[str]

    @classmethod
    def joined(cls, runs: list["Run"]) -> "Run":
        """Combine the runs of all ranks, whose losses are equal."""
        worst = [max(differences) for differences in zip(*(run.gradient_differences for run in runs), strict=True)]
        of_losses = [max(differences) for differences in zip(*(run.loss_differences for run in runs), strict=True)]
        sent = Counter({kind: round(mean(run.sent[kind] for run in runs)) for kind in runs[0].sent})
        first = runs[0]
        peak = max(run.peak for run in runs)
        return cls(first.strategy, first.losses, of_losses, worst, first.seconds, peak, sent)

    def tokens_per_second(self, tokens_per_step: int) -> float:
        """Tokens per second in the median step, without the first step, in which bytes are counted."""
        return tokens_per_step / median(self.seconds[1:])


class Training:
    """Model, optimizer and data of a run on this rank.

    Args:
        options: options of the command line.
        text: ``(N,)`` uint8, training text.
        strategy: strategy of the run.
        build_optimizer: called with the model after it is sharded.
    """

    def __init__(self, options: Namespace, text: Tensor, strategy: Strategy, build_optimizer: BuildOptimizer) -> None:
        self.options, self.strategy = options, strategy
        rules, dtype = LogicalRules.load(strategy.rules), getattr(torch, options.dtype)
        config = model_config(strategy, random_routing=options.random_routing, sequence_length=options.sequence_length)
        self.model = Decoder(config, device="meta", dtype=dtype)
        self.mesh = Mesh(strategy.mesh) if strategy.mesh else Mesh.planned({})
        shardings = parameter_shardings(self.model, self.mesh, rules)
        rank = self.mesh.rank or 0
        self.parts = {name: each.sharding.slices(each.shape, rank) for name, each in shardings.items()}
        self.part = token_sharding(self.mesh, rules).slices((options.batch_size, options.sequence_length), rank)
        self.tokens = token_group(self.mesh, rules)
        if strategy.mesh:
            maxmoe.parallelize(self.model, self.mesh, rules, dispatch=strategy.dispatch)
        self.model.to_empty(device="cpu")
        torch.manual_seed(options.seed)
        reset_parameters(self.model)
        self.optimizer = build_optimizer(self.model, options)
        self.sequences = TrainingSequences(
            text, sequence_length=options.sequence_length, batch_size=options.batch_size, seed=options.seed
        )

    def gradients(self, step: int) -> tuple[float, Tensor]:
        """Compute the gradients of a step; return its loss and the number of tokens per expert ``(M, E)``."""
        inputs, targets = self.sequences.batch(step)
        self.optimizer.zero_grad()
        torch.manual_seed(step)  # for random routing, whose noise is then the same in every strategy
        output = self.model(inputs[self.part])
        losses = F.cross_entropy(output.logits.transpose(1, 2), targets[self.part], reduction="none")
        loss = maxmoe.mean_over_tokens(losses, tokens=self.tokens)
        (loss + output.aux_loss).backward()
        return loss.item(), output.tokens_per_expert

    def update(self, tokens_per_expert: Tensor) -> None:
        """Apply the gradients of the step."""
        self.optimizer.step()
        self.model.update_correction_bias(tokens_per_expert)

    def gradient_difference(self, path: Path) -> float:
        """Largest relative difference of this rank's gradients from the saved gradients of one process."""
        whole = torch.load(path, mmap=True)
        differences = []
        for name, parameter in self.model.named_parameters():
            expected = whole[name]
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if local is not None and local.numel():
                differences.append((local - expected[self.parts[name]]).abs().max() / expected.abs().max())
        return float(torch.stack(differences).max())

    def save_gradients(self, path: Path) -> None:
        """Save the gradients of one process for the comparison."""
        torch.save({name: parameter.grad for name, parameter in self.model.named_parameters()}, path)


def adamw(model: Decoder, options: Namespace) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def train(
    options: Namespace,
    text: Tensor,
    strategy: Strategy,
    record: Path,
    expected: list[float],
    advance: Callable[[], None],
) -> Run:
    """Train on this rank.

    Args:
        options: options of the command line.
        text: ``(N,)`` uint8, training text.
        strategy: strategy of the run.
        record: folder for the gradients that one process saves.
        expected: losses of one process; empty in the run of one process.
        advance: called after every step.

    Returns:
        The measurements.
    """
    reset_peak()
    before, peak = status("RssAnon"), 0
    training, counted = Training(options, text, strategy, adamw), SentBytes()
    losses, differences, seconds = [], [], []
    for step in range(options.steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        with counted if step == 0 else nullcontext():
            loss, tokens_per_expert = training.gradients(step)
        training.update(tokens_per_expert)
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
        files = status("RssFile") + status("RssShmem")  # pages of shared libraries
        peak = max(peak, status("VmHWM") - files - before)
        if expected:
            differences.append(training.gradient_difference(record / f"{step}.pt"))
        else:
            training.save_gradients(record / f"{step}.pt")
        reset_peak()  # the comparison of gradients is not part of the training
        advance()
    apart = [abs(loss - other) for loss, other in zip(losses, expected or losses, strict=True)]
    return Run(strategy, losses, apart, differences or [0.0] * options.steps, seconds, peak, counted.counts)


def reset_peak() -> None:
    """Reset the peak memory `VmHWM` of this process."""
    Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    """Read a line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def train_all(options: Namespace, text: Tensor, advance: Callable[[Strategy], None]) -> list[Run]:
    """Train with one process, then with each strategy in turn.

    Args:
        options: options of the command line.
        text: ``(N,)`` uint8, training text.
        advance: called after every step.

    Returns:
        The measurements, the run of one process first.
    """
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as record:
        for strategy in [ONE_PROCESS, *strategies(options.ranks)]:
            num_ranks = options.ranks if strategy.mesh else 1
            expected = runs[0].losses if runs else []
            arguments = (options, text, strategy, Path(record), expected)
            runs.append(Run.joined(run_ranks(train, num_ranks, *arguments, advance=partial(advance, strategy))))
    return runs
