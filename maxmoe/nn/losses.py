"""Losses on the routing, each a plain function."""

from typing import TypeVar

import torch
from torch import Tensor

from maxmoe.config import ScoreFunction
from maxmoe.nn.parallel import AsOneSequence, TokenSums, WholeBatch

HERE = WholeBatch()
Number = TypeVar("Number", int, Tensor)


def normalized_scores(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Scores of every expert, scaled to sum one.

    p = s / (sum_e s + 1e-20);  the softmax for "softmax" and "identity"

    Args:
        logits: ``(T, E)``, floating.
        score_function: of the router.

    Returns:
        ``(T, E)``, dtype of logits.
    """
    if score_function in ("softmax", "identity"):
        return logits.softmax(-1)
    if score_function == "sigmoid":
        scores = logits.sigmoid()
    else:  # the square root has no slope at zero, where the softplus of large negative logits ends up
        softplus = torch.logaddexp(logits, torch.zeros_like(logits))
        scores = softplus.clamp_min(torch.finfo(logits.dtype).tiny).sqrt()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def load_balance_loss(
    probabilities: Tensor, tokens_per_expert: Tensor, top_k: int, *, sums: TokenSums = HERE
) -> Tensor:
    """Loss that is 1 for tokens spread evenly over the experts and grows with imbalance.

    mean_b sum_e f[b, e] * mean_s(probabilities[b, s, e]),   f[b, e] = E / (K S) * tokens_per_expert[b, e]

    Args:
        probabilities: ``(B, S, E)``, floating; carries the gradient.
        tokens_per_expert: ``(B, E)``, integer counts of the routed slots.
        top_k: K.
        sums: over the processes that share the tokens; B and S are sums too.

    Returns:
        ``()``, dtype of probabilities; 0 for no tokens.

    Source: DeepSeek-V3 (arXiv:2412.19437) equations 17-20; Switch Transformer (arXiv:2101.03961).
    """
    num_sequences, length, num_experts = probabilities.shape
    length, counts, mass = sums.sum_within_sequences(length, tokens_per_expert, probabilities.sum(1))
    length = at_least_one(length)
    frequencies = counts.to(probabilities.dtype) * (num_experts / (top_k * length))
    loss, num_sequences = sums.sum_across_sequences((frequencies * mass / length).sum(), num_sequences)
    return loss / at_least_one(num_sequences)


def router_z_loss(logits: Tensor, *, sums: TokenSums = HERE) -> Tensor:
    """Loss that keeps the logits small.

    mean_t logsumexp(logits[t])^2

    Args:
        logits: ``(T, E)``, floating.
        sums: over the processes that share the tokens; T is a sum too.

    Returns:
        ``()``, dtype of logits; 0 for no tokens.

    Source: ST-MoE (arXiv:2202.08906) equation 5.
    """
    squares = logits.logsumexp(-1).square()
    total, num_tokens = AsOneSequence(sums).sum_within_sequences(squares.sum(), squares.shape[0])
    return total / at_least_one(num_tokens)


def at_least_one(count: Number) -> Number:
    """Make a count fit to divide by."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
