"""Grouped matrix multiplication."""

from typing import Any

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake
from maxmoe.ops._low_rank import LowRankFactors, operands
from maxmoe.ops._quantized import parts_of
from maxmoe.quantization import QuantizedStack


def gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    bias: Tensor | None = None,
    factors: LowRankFactors | None = None,
    group_offset: int = 0,
) -> Tensor:
    """Multiply each group of rows by the matrix of the group.

    out[r] = lhs[r] @ rhs[g - group_offset] + bias[g - group_offset]   for the rows r of group g

    G may exceed L: rows of groups without a matrix in `rhs` are zero in the result, as are rows after the last group,
    for any values in lhs. `rhs` may be a transposed view, which is not copied.

    Args:
        lhs: ``(R, D)``, floating, rows sorted by group.
        rhs: ``(L, D, F)``, dtype of lhs, matrices of the groups; or a `maxmoe.quantization.QuantizedStack` of this
            shape, which is decoded while it is multiplied. The result has the same bits as with
            ``rhs.dequantize(lhs.dtype)``.
        group_sizes: ``(G,)``, int64, number of rows of each group; their sum is at most R.
        bias: ``(L, F)``, dtype of lhs, or None.
        factors: low-rank factors beside `rhs`, of any floating dtype, computed in the dtype of lhs; or None. rhs stands
            for rhs + scale * a b, which is not formed.
        group_offset: index of the group that rhs[0] belongs to.

    Returns:
        ``(R, F)``, dtype of lhs, products.

    Source: MegaBlocks (arXiv:2211.15841); MaxText `gmm`.
    """
    options: dict[str, Any] = {"bias": bias, "group_offset": group_offset}
    if isinstance(rhs, QuantizedStack):
        options |= {f"rhs_{name}": value for name, value in parts_of(rhs, "rhs").items()}
        options |= {"rhs_columns": rhs.columns, "rhs_is_transposed": rhs.is_transposed}
        rhs = rhs.codes
    if factors is not None:
        a, b = operands(factors, lhs.dtype, "factors")
        of_both: tuple[Tensor, Tensor] = torch.ops.maxmoe.gmm_low_rank(lhs, rhs, a, b, group_sizes, **options)
        return of_both[0]
    out: Tensor = torch.ops.maxmoe.gmm(lhs, rhs, group_sizes, **options)
    return out


def _width(rhs: Tensor, options: dict[str, Any]) -> int:
    """Return F."""
    if options.get("rhs_format") is None:
        return rhs.shape[2]
    return rhs.shape[1] if options.get("rhs_is_transposed") else int(options["rhs_columns"])


@register_fake("gmm")
def _gmm_fake(lhs: Tensor, rhs: Tensor, *_: object, **options: Any) -> Tensor:
    return lhs.new_empty(lhs.shape[0], _width(rhs, options))


@register_fake("gmm_low_rank")
def _gmm_low_rank_fake(lhs: Tensor, rhs: Tensor, a: Tensor, *_: object, **options: Any) -> tuple[Tensor, Tensor]:
    return lhs.new_empty(lhs.shape[0], _width(rhs, options)), lhs.new_empty(lhs.shape[0], a.shape[2])
