"""The training of one model with Muon, sharded in several ways: losses, step time, and what Muon sends."""

import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import Tensor

from dispatching.ranks import run_ranks
from dispatching.sent_bytes import SentBytes
from dispatching.strategies import ONE_PROCESS, Strategy, muon_strategies
from dispatching.training import Training
from maxmoe.models import Decoder
from maxmoe.optim import Muon, parameter_groups


@dataclass(frozen=True)
class MuonRun:
    """What was measured, on one rank or, joined, on all.

    Args:
        strategy: by which the model was trained.
        losses: of every step, nats per byte, without the balance loss.
        seconds: of every step.
        muon_seconds: of these in the optimizer.
        collectives: of the optimizer in a step.
        muon_sent: bytes that a rank sends in them; the mean over ranks.
        sent: bytes that it sends in a step, with them; the mean over ranks.
    """

    strategy: Strategy
    losses: list[float]
    seconds: list[float]
    muon_seconds: list[float]
    collectives: int
    muon_sent: float
    sent: float

    @classmethod
    def joined(cls, runs: list["MuonRun"]) -> "MuonRun":
        """Join the measurements of all ranks, whose losses and collectives are the same."""
        sent, muon_sent = mean(run.sent for run in runs), mean(run.muon_sent for run in runs)
        return replace(runs[0], muon_sent=muon_sent, sent=sent)

    @property
    def step_time(self) -> float:
        """Seconds of the median step; the first one, in which bytes are counted, is left out."""
        return median(self.seconds[1:])

    @property
    def muon_time(self) -> float:
        """Seconds of the optimizer in the median step, likewise."""
        return median(self.muon_seconds[1:])

    def loss_difference(self, other: "MuonRun") -> float:
        """Return the largest difference of a loss from that of another run."""
        return max(abs(one - two) for one, two in zip(self.losses, other.losses, strict=True))


def muon(model: Decoder, options: Namespace) -> Muon:
    """Make Muon, with Newton-Schulz in the dtype of the parameters."""
    groups = parameter_groups(model, adamw={"betas": (0.9, 0.95)})
    ns_dtype = getattr(torch, options.dtype)
    return Muon(groups, lr=options.learning_rate, adjust_lr_fn="match_rms_adamw", ns_dtype=ns_dtype)


def train(options: Namespace, text: Tensor, strategy: Strategy, advance: Callable[[], None]) -> MuonRun:
    """Take all steps on this rank.

    Args:
        options: the command line.
        text: ``(N,)`` uint8.
        strategy: to train by.
        advance: called after every step.

    Returns:
        What was measured.
    """
    training, of_model, of_muon = Training(options, text, strategy, muon), SentBytes(), SentBytes()
    losses, seconds, muon_seconds = [], [], []
    for step in range(options.steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        with of_model if step == 0 else nullcontext():
            loss, tokens_per_expert = training.gradients(step)
        middle = time.perf_counter()
        with of_muon if step == 0 else nullcontext():
            training.update(tokens_per_expert)
        end = time.perf_counter()
        losses.append(loss)
        seconds.append(end - start)
        muon_seconds.append(end - middle)
        advance()
    muon_sent = of_muon.counts.total()
    sent = of_model.counts.total() + muon_sent
    return MuonRun(strategy, losses, seconds, muon_seconds, of_muon.times.total(), muon_sent, sent)


def train_all(options: Namespace, text: Tensor, advance: Callable[[Strategy], None]) -> list[MuonRun]:
    """Train by one process and then by all strategies, one after the other.

    Args:
        options: the command line.
        text: ``(N,)`` uint8.
        advance: called after every step.

    Returns:
        What was measured, one process first.
    """
    runs = []
    for strategy in [ONE_PROCESS, *muon_strategies(options.ranks)]:
        num_ranks = options.ranks if strategy.mesh else 1
        arguments = (options, text, strategy)
        runs.append(MuonRun.joined(run_ranks(train, num_ranks, *arguments, advance=lambda s=strategy: advance(s))))
    return runs
