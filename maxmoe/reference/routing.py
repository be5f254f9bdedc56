"""Specification of the routing, with the names, arguments and results of `maxmoe.ops`."""

import math

import torch
from torch import Tensor

from maxmoe.config import MoEConfig, Normalization, ScoreFunction
from maxmoe.config.components import GroupScore


def wide(tensor: Tensor) -> Tensor:
    """Convert to float32, unless float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def stack(rows: list[Tensor], like: Tensor, *width: int) -> Tensor:
    """Stack the rows, each [*width], in the dtype of `like`."""
    return torch.stack(rows).to(like.dtype) if rows else like.new_zeros((0, *width))


def scores(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Return the scores of logits [..., E], float32 or wider."""
    match score_function:
        case "softmax":
            return torch.softmax(wide(logits), -1)
        case "sigmoid":
            return torch.sigmoid(wide(logits))
        case "sqrtsoftplus":
            return torch.sqrt(torch.logaddexp(wide(logits), wide(torch.zeros_like(logits))))
        case "identity":
            return wide(logits)


def best(values: list[float], candidates: list[int], count: int) -> list[int]:
    """Return the `count` candidates with the largest values, best first; equal values by index."""
    return sorted(candidates, key=lambda candidate: (-values[candidate], candidate))[:count]


def select_experts(
    biased: list[float],
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    group_score: GroupScore,
    *,
    others_are_zero: bool = False,
) -> list[int]:
    """Return the best experts of one token in its best groups; experts of other groups are excluded, or score zero."""
    size = len(biased) // num_groups
    members = [list(range(group * size, (group + 1) * size)) for group in range(num_groups)]
    count = 2 if group_score == "top2" else 1
    group_scores = [sum(biased[expert] for expert in best(biased, group, count)) for group in members]
    groups = best(group_scores, list(range(num_groups)), top_k_groups)
    allowed = [expert for group in groups for expert in members[group]]
    if not others_are_zero:
        return best(biased, allowed, top_k)
    everyone = range(len(biased))
    return best([biased[expert] if expert in allowed else 0.0 for expert in everyone], list(everyone), top_k)


def selected_by_scores(
    config: MoEConfig,
    logits: Tensor,
    correction_bias: Tensor | None,
    group_score: GroupScore,
    *,
    others: Tensor | None = None,
    others_are_zero: bool = False,
) -> Tensor:
    """Return the experts [T, K] of tokens with logits [T, E], by `others` [T, E] instead of scores if given."""
    score = scores(logits, config.score_function) if others is None else others
    biased = score if correction_bias is None else score + correction_bias
    rule = (config.top_k, config.num_groups, config.top_k_groups, group_score)
    chosen = [torch.tensor(select_experts(token, *rule, others_are_zero=others_are_zero)) for token in biased.tolist()]
    return stack(chosen, torch.empty(0, dtype=torch.int64), config.top_k)


def normalize(selected: Tensor, normalization: Normalization) -> Tensor:
    """Return the weights of the K selected scores of one token."""
    match normalization:
        case "none":
            return selected
        case "sum":
            return selected / (selected.sum() + 1e-20)
        case "softmax":
            return torch.softmax(selected, -1)


def balanced_bias(score: Tensor, correction_bias: Tensor, top_k: int) -> Tensor:
    """Return the biases [E] by which every expert is among the K best of K / E of the tokens, minus their mean.

    The bias of an expert is the K / E quantile of cutoff - score over the tokens, given scores [T, E] and the bias [E]
    by which they are routed. The cutoff of a token is its (K+1)-th best score + correction_bias.
    """
    num_tokens, num_experts = score.shape
    cutoffs = [sorted(row, reverse=True)[top_k] for row in (score + correction_bias).tolist()]
    rank = math.ceil(num_tokens * top_k / num_experts)  # of the quantile, from 1
    biases = []
    for expert in range(num_experts):
        required = [cutoff - token_score[expert] for cutoff, token_score in zip(cutoffs, score.tolist(), strict=True)]
        biases.append(sorted(required)[rank - 1])
    return torch.tensor([bias - sum(biases) / num_experts for bias in biases], dtype=correction_bias.dtype)


def route(
    logits: Tensor,
    top_k: int,
    *,
    score_function: ScoreFunction = "softmax",
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    group_score: GroupScore = "top2",
    normalization: Normalization = "sum",
    scale: float = 1.0,
    experts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Select experts by score + correction_bias, unless `experts` are given, and weigh them by score.

    Returns weights [T, K], experts [T, K], and probabilities [T, E], the scores divided by their sum.
    """
    weights, chosen, probabilities = [], [], []
    score = scores(logits, score_function)
    shares = scores(logits, "softmax") if score_function == "identity" else score
    biased = score if correction_bias is None else score + correction_bias
    for t, (token_score, token_biased) in enumerate(zip(score, biased.tolist(), strict=True)):
        ids = select_experts(token_biased, top_k, num_groups, top_k_groups, group_score)
        if experts is not None:
            ids = experts[t].tolist()
        present = [expert for expert in ids if expert >= 0]
        row = [token_score.new_zeros(())] * top_k
        if present:
            normalized = iter(
                normalize(torch.stack([token_score[expert] for expert in present]), normalization) * scale
            )
            row = [next(normalized) if expert >= 0 else token_score.new_zeros(()) for expert in ids]
        weights.append(torch.stack(row))
        chosen.append(torch.tensor(ids))
        probabilities.append(shares[t] / (shares[t].sum() + 1e-20))
    return (
        stack(weights, score, top_k),
        stack(chosen, torch.empty(0, dtype=torch.int64), top_k),
        stack(probabilities, score, logits.shape[1]),
    )
