"""Two ways to compute a step: every rank has the whole model, or the stages of a pipeline."""

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from maxmoe import mean_over_tokens, parallelize, pipeline
from maxmoe.models import Decoder, DecoderOutput
from maxmoe.parallel import clip_grad_norm_
from pretraining import InputError
from pretraining.ranks import Split


def autocast(options: Namespace) -> torch.autocast:
    """Return the context in which the model computes."""
    return torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16")


class WholeModel:
    """Computes a step with the whole model; if there are several ranks, its parameters are sharded.

    Args:
        model: model, which is sharded in place.
        split: sharding of the model and of the batches.
        options: options of the command line.
    """

    def __init__(self, model: Decoder, split: Split, options: Namespace) -> None:
        self.model, self._split, self._options = model, split, options
        if dist.is_initialized():
            chosen = {"dispatch": options.dispatch, "num_chunks": options.num_chunks}
            try:
                parallelize(model, split.mesh, split.rules, **chosen)
            except ValueError as error:
                raise InputError(f"{written(chosen)}: {error}") from error

    def backward(self, tokens: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
        """Compute the loss of a batch, as `evaluate`, and the gradients of loss and auxiliary loss."""
        loss, output = self._loss(tokens, targets, num_tokens)
        (loss + output.aux_loss).backward()
        return loss.detach()

    def evaluate(self, tokens: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
        """Compute the loss of a batch.

        Args:
            tokens: ``(B, S)``, the whole batch. Each rank computes with its part.
            targets: ``(B, S)``, the next tokens; -100 is ignored.
            num_tokens: divisor of the sum of the cross entropies.

        Returns:
            ``()``, cross entropy in nats, equal on all ranks.
        """
        return self._loss(tokens, targets, num_tokens)[0]

    def _loss(self, tokens: Tensor, targets: Tensor, num_tokens: int) -> tuple[Tensor, DecoderOutput]:
        with autocast(self._options):
            output = self.model(self._split.part(tokens))
        expected = self._split.part(targets).flatten()
        token_losses = F.cross_entropy(output.logits.float().flatten(0, 1), expected, reduction="none")
        divisor, tokens_of_ranks = torch.tensor(num_tokens), self._split.tokens
        loss = mean_over_tokens(token_losses, expected != -100, num_tokens=divisor, tokens=tokens_of_ranks)
        return loss, output

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the total norm of the gradients, and return it."""
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def generate(self, prompt: Tensor, num_tokens: int) -> Tensor | None:
        """Return prompt ``(1, S)`` and generated tokens."""
        return self.model.generate(prompt, num_tokens, temperature=0.8)


class Stages:
    """Computes the same with a pipeline, whose stages have a part of the model each."""

    def __init__(self, model: Decoder, split: Split, options: Namespace) -> None:
        self._split, self._options = split, options
        chosen = {"schedule": options.schedule or "1f1b", "num_micro_batches": options.num_micro_batches}
        try:
            self._pipeline = pipeline(
                model,
                split.mesh,
                split.rules,
                loss=loss,
                aux_loss_scale=1 / options.num_micro_batches,  # the mean, because all have the same size
                dispatch=options.dispatch,
                num_chunks=options.num_chunks,
                **chosen,
            )
        except ValueError as error:
            sizes = {"mesh": options.mesh, "num_layers": options.num_layers}
            raise InputError(f"{written(sizes | chosen)}: {error}") from error
        self.model = self._pipeline.model

    def backward(self, tokens: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
        """Compute loss and gradients of a batch."""
        with autocast(self._options):
            return self._pipeline.step(self._split.part(tokens), (self._split.part(targets), num_tokens)).loss

    def evaluate(self, tokens: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
        """Compute the loss of a batch."""
        with autocast(self._options):
            return self._pipeline.evaluate(self._split.part(tokens), (self._split.part(targets), num_tokens)).loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the total norm of the gradients of all stages, and return it."""
        return self._pipeline.clip_grad_norm_(max_norm)

    def generate(self, prompt: Tensor, num_tokens: int) -> Tensor | None:
        """Return None: no rank has the whole model."""
        return None


def loss(output: DecoderOutput, targets: tuple[Tensor, int]) -> Tensor:
    """Sum the cross entropies of a micro-batch and divide by the number of tokens of all micro-batches and ranks."""
    expected, num_tokens = targets
    return F.cross_entropy(output.logits.float().flatten(0, 1), expected.flatten(), reduction="sum") / num_tokens


def written(options: dict[str, Any]) -> str:
    """Return options as they are written on the command line."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
