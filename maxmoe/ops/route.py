"""Scores, selection of the top experts, and the routing weights."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def route(
    logits: Tensor,
    top_k: int,
    *,
    score_function: str = "softmax",
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    group_score: str = "top2",
    normalization: str = "sum",
    scale: float = 1.0,
    experts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the experts of each token and compute their routing weights.

    s = score(logits);  experts[t] = top_k of (s + correction_bias)[t] within the best groups;
    weights[t] = scale * normalization(s[t, experts[t]]);  probabilities[t] = s[t] / (sum_e s[t, e] + 1e-20)

    The score of a group is the sum of its two best biased scores, or its best biased score. Experts are sorted by
    biased score, best first, and equal scores by index. The weights are computed from s, not from the biased scores.
    Gradients flow from `weights` and `probabilities` to `logits`, not to `correction_bias`. For "identity", the
    probabilities are the softmax of the logits.

    Args:
        logits: ``(T, E)``, floating; computed in float32 or wider.
        top_k: K, experts per token.
        score_function: "softmax", "sigmoid", "sqrtsoftplus" or "identity".
        correction_bias: ``(E,)``, floating, added to the scores for the selection only.
        num_groups: number of groups of equal size that the experts form.
        top_k_groups: number of groups from which the experts of a token are selected.
        group_score: score of a group: "top2" or "max".
        normalization: "none", "sum" (divide by the sum + 1e-20) or "softmax", over the K selected scores.
        scale: factor of the weights.
        experts: ``(T, K)``, int64, in [-1, E), experts to use instead of a selection; the weight of -1 is 0.

    Returns:
        weights ``(T, K)``, float32 or wider, experts ``(T, K)``, int64, and probabilities ``(T, E)``, dtype of weights.

    Raises:
        ValueError: for a wrong argument, or logits that give NaN scores.

    Source: DeepSeek-V3 (arXiv:2412.19437) section 2.1.2; DeepSeek-V2 (arXiv:2405.04434) section 2.2.2 for the group
    score "max"; MaxText `get_topk`.
    """
    weights, chosen, probabilities = torch.ops.maxmoe.route(
        logits,
        top_k,
        score_function=score_function,
        correction_bias=correction_bias,
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        group_score=group_score,
        normalization=normalization,
        scale=scale,
        experts=experts,
    )
    return weights, chosen, probabilities


@register_fake("route")
def _route_fake(logits: Tensor, top_k: int, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    shape, wide = (logits.shape[0], top_k), torch.promote_types(logits.dtype, torch.float32)
    return (
        logits.new_empty(shape, dtype=wide),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty(logits.shape, dtype=wide),
    )


@register_fake("route_backward")
def _route_backward_fake(logits: Tensor, **_: object) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
