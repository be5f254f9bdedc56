"""The model, its optimizer and the history of a run."""

import math
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from maxmoe import MoE, MoEConfig, StatsAccumulator, StepStats
from maxmoe.expert_load import LoadHistory
from maxmoe.expert_load.history import NUM_WINDOWS
from maxmoe.expert_load.stats import BoundedMoEStats
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.optim import Muon, parameter_groups
from pretraining import InputError, checkpoint
from pretraining.corpus import Corpus, TrainingSequences
from pretraining.ranks import Split
from pretraining.steps import Stages, WholeModel

DEFAULT_STEPS = 1600


BALANCING = {"score_correction_bias": True, "correction_bias_update_rate": 1e-3, "load_balance_loss_weight": 1e-3}


def decoder_config(options: Namespace, balancing: Mapping[str, Any] = BALANCING) -> DecoderConfig:
    """Return the config of the model.

    Args:
        options: options of the command line.
        balancing: fields of `MoEConfig` that balance the load.

    Raises:
        InputError: if the sizes do not fit together.
    """
    try:
        moe = MoEConfig(
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_experts=options.num_experts,
            top_k=options.top_k,
            score_function="sigmoid",
            **balancing,
        )
        return DecoderConfig(
            vocab_size=256,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            moe=moe,
            max_sequence_length=options.sequence_length,
        )
    except ValueError as error:
        raise InputError(str(error)) from error


def build_model(options: Namespace, balancing: Mapping[str, Any] = BALANCING) -> Decoder:
    """Return a randomly initialized model."""
    config = decoder_config(options, balancing)
    torch.manual_seed(options.seed)
    return Decoder(config)


def build_optimizer(model: nn.Module, options: Namespace) -> torch.optim.Optimizer:
    """Return the optimizer. Norms and biases have no weight decay."""
    peak, betas, weight_decay = options.learning_rate, (0.9, 0.95), 0.1
    if options.optimizer == "muon":
        groups = parameter_groups(model, adamw={"betas": betas})
        ns_dtype = torch.float32 if options.dtype == "float32" else None  # None: a dtype that is fast on this machine
        return Muon(groups, lr=peak, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw", ns_dtype=ns_dtype)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    by_decay = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(by_decay, lr=peak, betas=betas, fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Learning rate of a step: linear warmup over 5 % of the steps, then cosine decay to 5 % of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


@dataclass
class History:
    """Losses and expert load of the run; part of the checkpoint.

    Args:
        load: load of each expert.
        training: training loss of each step in bits per byte.
        held_out: pairs of step and bits per byte on the held-out text.
    """

    load: LoadHistory
    training: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def resumed(cls, load: Mapping[str, Tensor], training: list[float], held_out: list[tuple[int, float]]) -> "History":
        """Return the history of a run so far, given the expert load in the windows of its steps."""
        history = LoadHistory()
        history.load_state_dict({"num_steps": len(training), "tokens_per_expert": load})
        return cls(history, training, held_out)

    def record(self, bits_per_byte: float, layers: Mapping[str, BoundedMoEStats]) -> None:
        """Add the loss and the statistics of a step."""
        self.training.append(bits_per_byte)
        self.load.add(layers)


class Trainer:
    """State and steps of a run. With several ranks, all ranks call each method together.

    Args:
        options: options of the command line.
        corpus: training and held-out text.
        balancing: fields of `MoEConfig` that balance the load.
    """

    def __init__(self, options: Namespace, corpus: Corpus, balancing: Mapping[str, Any] = BALANCING) -> None:
        self.options = options
        self.corpus = corpus
        split = Split(options)
        split.check_memory(decoder_config(options, balancing), options.optimizer, options.dispatch, options.num_chunks)
        model = build_model(options, balancing)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        layers = [path for path, module in model.named_modules() if isinstance(module, MoE)]  # layers of all stages
        no_load = torch.zeros(NUM_WINDOWS, options.num_experts, dtype=torch.int64)
        self.history = History.resumed(dict.fromkeys(layers, no_load), [], [])
        self.computation = (Stages if split.has_stages else WholeModel)(model, split, options)
        self.model = self.computation.model  # this rank's part of the model
        self.optimizer = build_optimizer(self.model, options)
        self.accumulator = StatsAccumulator(self.model)
        self.sequences = TrainingSequences(
            corpus.training,
            sequence_length=options.sequence_length,
            batch_size=options.batch_size,
            seed=options.seed,
        )
        self.steps = options.steps or DEFAULT_STEPS
        self.checkpoint = Path(os.path.realpath(options.out / "checkpoint"))  # a symbolic link is kept

    @property
    def step(self) -> int:
        """Number of steps done."""
        return len(self.history.training)

    def train_step(self) -> StepStats:
        """Take one optimizer step, add it to the history and return its statistics."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.options.learning_rate)
        tokens, targets = self.sequences.batch(self.step)
        self.optimizer.zero_grad()
        with self.diverging():
            loss = self.computation.backward(tokens, targets, targets.numel())
        norm = self.computation.clip_grad_norm_(1.0)
        if not norm.isfinite():
            raise self.diverged(f"the gradient is {norm:.0f}")
        self.optimizer.step()
        stats = self.accumulator.update()  # moves the correction biases as well
        self.history.record(loss.item() / math.log(2), stats.layers)
        return stats

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return bits per byte on the held-out text. The context of a sequence starts one byte before it."""
        pieces = self.corpus.held_out.long()
        tokens, targets = (part.reshape(-1, self.options.sequence_length) for part in (pieces[:, :-1], pieces[:, 1:]))
        missing = -len(tokens) % self.options.batch_size  # rows that fill up the last batch, so that it can be sharded
        tokens, targets = F.pad(tokens, (0, 0, 0, missing)), F.pad(targets, (0, 0, 0, missing), value=-100)
        batches = zip(*(part.split(self.options.batch_size) for part in (tokens, targets)), strict=True)
        with self.diverging():
            num_tokens = pieces[:, 1:].numel()
            losses = [self.computation.evaluate(inputs, nexts, num_tokens).item() for inputs, nexts in batches]
        bits_per_byte = sum(losses) / math.log(2)
        if not math.isfinite(bits_per_byte):
            raise self.diverged(f"{bits_per_byte} bits per byte on held-out text")
        self.history.held_out.append((self.step, bits_per_byte))
        return bits_per_byte

    def sample(self, prompt_bytes: int, sample_bytes: int) -> str | None:
        """Generate a continuation of the first held-out bytes, equal on all ranks; None if the model is in stages."""
        torch.manual_seed(self.options.seed)
        prompt = self.corpus.held_out[:1, 1 : 1 + prompt_bytes].long()
        with self.diverging():
            continued = self.computation.generate(prompt, sample_bytes)
        return None if continued is None else bytes(continued[0].tolist()).decode(errors="replace")

    def diverged(self, what: str) -> InputError:
        """Return the error for a run that has diverged."""
        return InputError(f"step {self.step}: {what}, try a smaller --learning-rate")

    @contextmanager
    def diverging(self) -> Iterator[None]:
        """Report the error of the router for NaN logits as divergence, unless it occurs before the first step."""
        try:
            yield
        except ValueError as error:
            if not self.step:
                raise
            raise self.diverged(str(error)) from error

    def configuration(self) -> dict[str, Any]:
        """Options that must be equal when a run is resumed, and the fingerprint of the text."""
        of_the_ranks = ("mesh", "rules", "dispatch", "num_chunks", "schedule", "num_micro_batches")
        free = ("data", "out", "beside", "resume", "steps", "eval_every", "save_every", *of_the_ranks)
        chosen = {name: value for name, value in vars(self.options).items() if name not in free}
        return {**chosen, "data": self.corpus.fingerprint}

    def state(self) -> dict[str, Any]:
        """Return the tensors of the checkpoint; parameters and optimizer state are DTensors if there are several ranks.

        Hyperparameters of the optimizer are not included, because `build_optimizer` sets them.
        """
        model, optimizer = get_state_dict(self.model, self.optimizer)
        load = torch.stack([*self.history.load.tokens_per_expert.values()], 1)  # (windows, M, E)
        return {"model": model, "optimizer": optimizer["state"], "load": load, "random_state": torch.get_rng_state()}

    def save(self) -> None:
        """Save the checkpoint."""
        training = {
            "configuration": self.configuration(),
            "steps": self.steps,
            "training": self.history.training,
            "held_out": self.history.held_out,
        }
        checkpoint.save(self.checkpoint, self.state(), training)

    def resume(self) -> None:
        """Load the checkpoint, which may be from another mesh. --steps replaces its number of steps."""
        state = self.state()
        training = checkpoint.load(self.checkpoint, self.configuration(), state)
        _, optimizer = get_state_dict(self.model, self.optimizer)
        optimizer["state"] = state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=optimizer)
        try:
            torch.set_rng_state(state["random_state"])
        except RuntimeError as error:
            raise InputError(f"cannot read the checkpoint {self.checkpoint}: random_state is invalid") from error
        held_out = [(step, bits) for step, bits in training["held_out"]]
        load = dict(zip(self.history.load.tokens_per_expert, state["load"].unbind(1), strict=True))
        self.history = History.resumed(load, training["training"], held_out)
        self.steps = self.options.steps or training["steps"]
        if self.steps < self.step:
            raise InputError(f"--steps {self.steps}: the run in {self.options.out} has done {self.step} already")
