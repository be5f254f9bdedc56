"""A linear map whose result does not depend on the number of threads."""

import torch
from torch import Tensor

from maxmoe.ops.gmm import gmm


def linear(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map rows: `maxmoe.ops.gmm` with one group.

    x @ matrix + bias

    A router that sums in another order under another number of threads may choose other experts; torch's own product
    does, in forward and backward.

    Args:
        x: ``(T, D)``, floating.
        matrix: ``(D, F)``, dtype of x; may be a transposed view.
        bias: ``(F,)``, dtype of x, or None.

    Returns:
        ``(T, F)``, dtype of x.
    """
    group_sizes = torch.full((1,), x.shape[0], device=x.device)
    return gmm(x, matrix.unsqueeze(0), group_sizes, bias=None if bias is None else bias.unsqueeze(0))
