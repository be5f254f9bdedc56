"""Trains one model with Muon under several shardings; measures losses, step time and the bytes that Muon sends."""

import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
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
    """Measurements of a run, on one rank or combined over all.

    Args:
        strategy: strategy of the run.
        losses: loss of each step in nats per byte, without the load balance loss.
        seconds: time of each step.
        muon_seconds: time of each optimizer step.
        collectives: number of collectives per optimizer step.
        muon_sent: bytes that a rank sends per optimizer step; mean over ranks.
        sent: bytes that a rank sends per step, including the optimizer step; mean over ranks.
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
        """Combine the runs of all ranks, whose losses and collectives are equal."""
        sent, muon_sent = mean(run.sent for run in runs), mean(run.muon_sent for run in runs)
        return replace(runs[0], muon_sent=muon_sent, sent=sent)

    @property
    def step_time(self) -> float:
        """Median step time in seconds, without the first step, in which bytes are counted."""
        return median(self.seconds[1:])

    @property
    def muon_time(self) -> float:
        """Median time of the optimizer step in seconds, without the first step."""
        return median(self.muon_seconds[1:])

    def loss_difference(self, other: "MuonRun") -> float:
        """Largest difference between the losses of two runs, over all steps."""
        return max(abs(one - two) for one, two in zip(self.losses, other.losses, strict=True))


def muon(model: Decoder, options: Namespace) -> Muon:
    """Return Muon, with Newton-Schulz in the dtype of the parameters."""
    groups = parameter_groups(model, adamw={"betas": (0.9, 0.95)})
    ns_dtype = getattr(torch, options.dtype)
    return Muon(groups, lr=options.learning_rate, adjust_lr_fn="match_rms_adamw", ns_dtype=ns_dtype)


def train(options: Namespace, text: Tensor, strategy: Strategy, advance: Callable[[], None]) -> MuonRun:
    """Train on this rank.

    Args:
        options: options of the command line.
        text: ``(N,)`` uint8, training text.
        strategy: strategy of the run.
        advance: called after every step.

    Returns:
        The measurements.
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
    """Train with one process, then with each strategy in turn.

    Args:
        options: options of the command line.
        text: ``(N,)`` uint8, training text.
        advance: called after every step.

    Returns:
        The measurements, the run of one process first.
    """
    runs = []
    for strategy in [ONE_PROCESS, *muon_strategies(options.ranks)]:
        num_ranks = options.ranks if strategy.mesh else 1
        arguments = (options, text, strategy)
        runs.append(MuonRun.joined(run_ranks(train, num_ranks, *arguments, advance=partial(advance, strategy))))
    return runs
