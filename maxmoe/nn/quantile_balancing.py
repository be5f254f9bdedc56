"""Quantile balancing: correction biases at which every expert would have had the same number of tokens."""

import torch
from torch import Tensor

from maxmoe.expert_load.stats_accumulator import NUM_BINS


def required_bias_histogram(
    scores: Tensor, correction_bias: Tensor, top_k: int, *, token_mask: Tensor | None = None
) -> Tensor:
    """Count, for each expert, the biases that the tokens would require to select it.

    required_bias[t, e] = cutoff[t] - scores[t, e]

    cutoff[t] is the (K+1)-th best of scores[t] + correction_bias. The bins are of equal width, from the smallest
    finite correction bias - 1 to the largest one + 1, which bound the required biases because scores are in [0, 1].

    Args:
        scores: ``(T, E)``, floating, scores in [0, 1].
        correction_bias: ``(E,)``, floating, correction bias by which the tokens are routed.
        top_k: K, experts per token, below E.
        token_mask: ``(T,)``, bool, False for padding; None for no padding.

    Returns:
        ``(E, 1000)``, float64, number of tokens in each bin.

    Source: Kimi K3 technical report, section 2.3.3 and appendix D.
    """
    num_tokens, num_experts = scores.shape
    biased = scores + correction_bias
    cutoff = biased.topk(top_k + 1, dim=1, sorted=True).values[:, -1:]
    low, width = _bins(correction_bias)
    bins = ((cutoff - scores - low) / width).long().clamp(0, NUM_BINS - 1)
    places = bins + NUM_BINS * torch.arange(num_experts, device=scores.device)
    counted = torch.ones(num_tokens, 1, dtype=torch.float64, device=scores.device)
    if token_mask is not None:
        counted = token_mask.unsqueeze(1).double()
    histogram = counted.new_zeros(num_experts * NUM_BINS)
    return histogram.scatter_add(0, places.flatten(), counted.expand_as(places).flatten()).view(num_experts, NUM_BINS)


def balanced_bias(histogram: Tensor, correction_bias: Tensor, top_k: int) -> Tensor:
    """Return the correction bias at which every expert would have been selected by K / E of the tokens.

    balanced_bias[e] = quantile of required_bias[:, e] at K / E, minus the mean over the experts

    The quantile is interpolated within its bin. Experts with an infinite bias, which all tokens or none select, keep
    it: the other experts share the slots that are left, and the mean is over them.

    Args:
        histogram: ``(E, 1000)``, float64, sum of `required_bias_histogram` over the tokens of an optimizer step.
        correction_bias: ``(E,)``, floating, correction bias of the step.
        top_k: K, experts per token.

    Returns:
        ``(E,)``, dtype of the correction bias; the correction bias itself if there are no tokens.
    """
    low, width = _bins(correction_bias.double())
    cumulative = histogram.cumsum(1)
    num_tokens = cumulative[:, -1:]
    is_finite = correction_bias.isfinite()
    num_finite = is_finite.sum().clamp_min(1).double()
    target = num_tokens * ((top_k - correction_bias.isposinf().sum()).clamp_min(0) / num_finite)
    bins = (cumulative < target).sum(1, keepdim=True).clamp_max(NUM_BINS - 1)
    in_bin = histogram.gather(1, bins)
    fraction = (target - cumulative.gather(1, bins) + in_bin) / in_bin.clamp_min(1)
    quantile = (low + width * (bins + fraction)).squeeze(1)
    balanced = quantile - quantile.where(is_finite, 0.0).sum() / num_finite
    return balanced.to(correction_bias.dtype).where((num_tokens[0] > 0) & is_finite, correction_bias)


def _bins(correction_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower end of the first bin and the width of all bins."""
    is_finite = correction_bias.isfinite()
    low, high = (
        correction_bias.where(is_finite, torch.inf).min() - 1,
        correction_bias.where(is_finite, -torch.inf).max() + 1,
    )
    return low, (high - low) / NUM_BINS
