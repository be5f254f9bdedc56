"""Selection of experts, and the plan that assigns rows to routed slots."""

from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe import _C
from maxmoe._torch.autograd import is_batched


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
    if not torch.compiler.is_compiling():
        return _C.route(
            logits,
            top_k,
            score_function,
            correction_bias,
            num_groups,
            top_k_groups,
            group_score,
            normalization,
            scale,
            experts,
        )
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


class RaggedPlan(NamedTuple):
    """Rows of the slots that are routed to local experts. A slot is a pair (token t, choice k) with index t * K + k.

    Attributes:
        slots: ``(R,)``, int64, slot of each row, sorted by expert, then by slot; -1 for an unused row. Unused rows
            exist only on devices other than the CPU, after all other rows.
        rows: ``(T * K,)``, int64, row of each slot; -1 for a slot without a row.
        group_sizes: ``(L,)``, int64, number of rows of each local expert; the sum is R less the unused rows.
        dropped: ``()``, int64, number of local slots past `max_rows`.
        top_k: K, slots per token.
    """

    slots: Tensor
    rows: Tensor
    group_sizes: Tensor
    dropped: Tensor
    top_k: int

    @classmethod
    def of_sorted_rows(cls, num_rows: int, group_sizes: Tensor) -> "RaggedPlan":
        """Return the plan of R rows that are already sorted by expert: K is 1, and row i belongs to slot i."""
        order = torch.arange(num_rows, device=group_sizes.device)
        return cls(order, order, group_sizes, group_sizes.new_zeros(()), 1)

    def of_rows(self) -> "RaggedPlan":
        """Return a plan of the same rows in the same order, with K = 1: each row is a slot, and none are summed."""
        places = torch.arange(self.slots.shape[0], device=self.slots.device).where(self.slots >= 0, -1)
        return RaggedPlan(places, places, self.group_sizes, self.group_sizes.new_zeros(()), 1)


def ragged_plan(
    experts: Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    max_rows: int | None = None,
    num_rows: int | None = None,
) -> RaggedPlan:
    """Sort the slots by expert with a stable counting sort of integers in O(T * K + E).

    The plan has a row for each slot whose expert is in [first_expert, first_expert + num_local_experts). Rows are
    contiguous from 0, so that later operators cost O(R), no matter how many slots have other experts.

    Args:
        experts: ``(T, K)``, int64, expert of each slot, in [0, num_experts), or -1 for a slot that is not routed.
        num_experts: E, number of experts.
        first_expert: index of the first local expert.
        num_local_experts: L, number of local experts; None for all from `first_expert` on.
        max_rows: largest number of rows; further slots are dropped and counted in `dropped`. On devices other than the
            CPU, it is the number of rows, at most T * K, so that the host does not wait for the actual number; the last
            rows may be unused.
        num_rows: R, if known, such as T * K if every slot has a local expert. Shapes are then static under
            torch.compile, and the host does not wait for the device. On devices other than the CPU it may exceed R.

    Raises:
        NotImplementedError: under `torch.func.vmap`, if the examples have different numbers of rows.

    Source: MaxText `ring_ragged_sort`, in one sort instead of two.
    """
    try:
        if not torch.compiler.is_compiling():
            return _C.ragged_plan(experts, num_experts, first_expert, num_local_experts, max_rows, num_rows)
        slots, rows, group_sizes, dropped = torch.ops.maxmoe.ragged_plan(
            experts,
            num_experts,
            first_expert=first_expert,
            num_local_experts=num_local_experts,
            max_rows=max_rows,
            num_rows=num_rows,
        )
    except RuntimeError as error:
        if not is_batched(experts):
            raise
        raise NotImplementedError(
            "ragged_plan: the examples of torch.func.vmap must have one number of rows, got several, as with padding "
            "or experts without rows: call the layer without vmap, since it takes any leading dims, or set "
            'implementation="dense"'
        ) from error
    return RaggedPlan(slots, rows, group_sizes, dropped, experts.shape[1])
