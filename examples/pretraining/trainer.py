"""The model, its optimizer and what was measured, which move together from step to step."""

import math
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from maxmoe import MoEConfig
from maxmoe.models import Decoder, DecoderConfig, DecoderOutput
from maxmoe.parallel import clip_grad_norm_
from pretraining import InputError, checkpoint
from pretraining.corpus import Corpus, TrainingSequences
from pretraining.ranks import Split

LOAD_WINDOWS = 100  # columns of the picture of the expert load


def build_model(options: Namespace) -> Decoder:
    """Make the model that the options describe, with freshly drawn parameters.

    Raises:
        InputError: if its sizes contradict each other.
    """
    try:
        moe = MoEConfig(
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_experts=options.num_experts,
            top_k=options.top_k,
            score_function="sigmoid",
            score_correction_bias=True,
            correction_bias_update_rate=1e-3,
            load_balance_loss_weight=1e-3,
        )
        config = DecoderConfig(
            vocab_size=256,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            moe=moe,
            max_sequence_length=options.sequence_length,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    torch.manual_seed(options.seed)
    return Decoder(config)


def build_optimizer(model: Decoder, peak: float) -> torch.optim.AdamW:
    """Make AdamW; weight decay is for matrices, norms and biases go without."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rise linearly over a twentieth of the steps, then fall as a cosine to a twentieth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


@dataclass
class History:
    """What the run has measured so far; part of the checkpoint.

    Args:
        tokens_per_expert: ``(W, M, E)`` int64, summed over W windows of equally many steps.
        training: bits per byte of every step's batch.
        held_out: pairs of step and bits per byte on the held-out text.
    """

    tokens_per_expert: Tensor
    training: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


class Trainer:
    """A run between two steps; on several ranks, all call every method together.

    Args:
        options: the command line.
        corpus: what to read.
    """

    def __init__(self, options: Namespace, corpus: Corpus) -> None:
        self.options = options
        self.corpus = corpus
        self.split = Split(options.mesh, options.rules, (options.batch_size, options.sequence_length))
        self.model = build_model(options)
        self.split.parallelize(self.model)
        self.optimizer = build_optimizer(self.model, options.learning_rate)
        self.sequences = TrainingSequences(
            corpus.training,
            sequence_length=options.sequence_length,
            batch_size=options.batch_size,
            seed=options.seed,
        )
        windows = min(LOAD_WINDOWS, options.steps)
        shape = (windows, options.num_layers, options.num_experts)
        self.history = History(torch.zeros(shape, dtype=torch.int64))

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.history.training)

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, DecoderOutput]:
        """Compute this rank's part of a batch.

        Args:
            tokens: ``(B, S)``, the whole batch.
            targets: ``(B, S)``, what follows them; -100 counts nothing.

        Returns:
            The sum of the cross entropies in nats, and the model's output.
        """
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
            output = self.model(self.split.part(tokens))
        expected = self.split.part(targets).flatten()
        return F.cross_entropy(output.logits.float().flatten(0, 1), expected, reduction="sum"), output

    def train_step(self) -> DecoderOutput:
        """Take one optimizer step and record it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.options.steps, self.options.learning_rate)
        tokens, targets = self.sequences.batch(self.step)
        token_losses, output = self.loss(tokens, targets)
        loss = token_losses / targets.numel()
        self.optimizer.zero_grad()
        (loss + output.aux_loss).backward()
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        if not norm.isfinite():
            raise InputError(f"step {self.step}: the gradient is {norm:.0f}, try a smaller --learning-rate")
        self.optimizer.step()
        self.model.update_correction_bias(output.tokens_per_expert)
        window = self.step * len(self.history.tokens_per_expert) // self.options.steps
        self.history.tokens_per_expert[window] += output.tokens_per_expert
        self.history.training.append(self.split.total(loss).item() / math.log(2))
        return output

    @torch.no_grad()
    def evaluate(self) -> float:
        """Measure bits per byte on the held-out text; a sequence knows only the byte before it."""
        pieces = self.corpus.held_out.long()
        tokens, targets = (part.reshape(-1, self.options.sequence_length) for part in (pieces[:, :-1], pieces[:, 1:]))
        missing = -len(tokens) % self.options.batch_size  # in the last batch, which is split like all others
        tokens, targets = F.pad(tokens, (0, 0, 0, missing)), F.pad(targets, (0, 0, 0, missing), value=-100)
        batches = zip(*(part.split(self.options.batch_size) for part in (tokens, targets)), strict=True)
        token_losses = torch.stack([self.loss(*batch)[0] for batch in batches]).sum()
        bits_per_byte = self.split.total(token_losses).item() / pieces[:, 1:].numel() / math.log(2)
        self.history.held_out.append((self.step, bits_per_byte))
        return bits_per_byte

    def sample(self, prompt_bytes: int, sample_bytes: int) -> str:
        """Continue the beginning of the held-out text; every rank computes the same."""
        torch.manual_seed(self.options.seed)
        prompt = self.corpus.held_out[:1, 1 : 1 + prompt_bytes].long()
        continued = self.model.generate(prompt, sample_bytes, temperature=0.8)
        return bytes(continued[0].tolist()).decode(errors="replace")

    def configuration(self) -> dict[str, Any]:
        """What must not change between a run and its continuation."""
        free = ("data", "out", "resume", "eval_every", "save_every", "mesh", "rules")
        chosen = {name: value for name, value in vars(self.options).items() if name not in free}
        return {**chosen, "data": self.corpus.fingerprint}

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer, each parameter under its name and, on several ranks, a DTensor."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self) -> None:
        """Write the checkpoint."""
        training = {
            "configuration": self.configuration(),
            "random_state": torch.get_rng_state(),
            **vars(self.history),
        }
        checkpoint.save(self.options.out / "checkpoint", self.state(), training)

    def resume(self) -> None:
        """Go on from the checkpoint, whatever mesh it was written on."""
        state = self.state()
        training = checkpoint.load(self.options.out / "checkpoint", self.configuration(), state)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.set_rng_state(training["random_state"])
        self.history = History(**{name: training[name] for name in vars(self.history)})
