"""Module of the experts that compute no matrix product."""

from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.config import MoEConfig
from maxmoe.declaration import TOKEN_DIMS, Declaration, SavedTensor
from maxmoe.nn.routing import TopK
from maxmoe.ops import linear


class ZeroComputationExperts(nn.Module):
    """Zero, copy and constant experts, which the router selects beside the experts of `Experts`.

    zero(x) = 0
    copy(x) = x
    constant_j(x) = a * x + b * vectors[j],   (a, b) = softmax(mixing[j] @ x)

    Their slots are neither sorted nor sent to other ranks. On a mesh, each rank computes them for its own tokens.

    Args:
        config: config of the layer.
        **options: device and dtype of the parameters.

    Source: MoE++ (arXiv:2410.07348) section 3.1; LongCat-Flash (arXiv:2509.01322) section 2.1, for copies.
    """

    vectors: Tensor | None
    mixing: Tensor | None

    def __init__(self, config: MoEConfig, **options: Any) -> None:
        super().__init__()
        self.config = config
        count, hidden_size = config.num_constant_experts, config.hidden_size

        def parameter(*shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **options)) if count else None

        self.register_parameter("vectors", parameter(count, hidden_size))
        self.register_parameter("mixing", parameter(count, 2, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the vectors with variance one and the mixing such that its logits have variance one."""
        if self.vectors is not None:
            nn.init.normal_(self.vectors)
        if self.mixing is not None:
            nn.init.normal_(self.mixing, std=self.config.hidden_size**-0.5)

    def forward(self, x: Tensor, top_k: TopK, dtype: torch.dtype | None = None) -> Tensor:
        """Compute the weighted sum of the copy and constant experts of each token.

        Args:
            x: ``(T, D)``, floating, tokens.
            top_k: expert ids and routing weights of the tokens; ids of other experts are skipped.
            dtype: dtype of the result; None for the dtype of x.

        Returns:
            ``(T, D)``, the weighted sums.
        """
        first_copy = self.config.num_experts + self.config.num_zero_experts
        first_constant = first_copy + self.config.num_copy_experts
        is_copy = (top_k.experts >= first_copy) & (top_k.experts < first_constant)
        # One factor of x per token; the product promotes a narrow x without saving a wide copy.
        factors = top_k.weights.masked_fill(~is_copy, 0.0).sum(1, keepdim=True)
        if self.vectors is None or self.mixing is None:
            return (x * factors).to(dtype or x.dtype)
        num_tokens, count = x.shape[0], self.config.num_constant_experts
        # A token selects an expert once at most, so that each element is written once, other than by zeros.
        index = (top_k.experts - first_constant).clamp_min(0)
        of_constants = top_k.weights.masked_fill(top_k.experts < first_constant, 0.0)
        weights = of_constants.new_zeros(num_tokens, count).scatter_add(1, index, of_constants)
        shares = linear(x, self.mixing.flatten(0, 1)).view(num_tokens, count, 2).softmax(2)
        of_x, of_vectors = (shares * weights.unsqueeze(2)).unbind(2)
        return (x * (factors + of_x.sum(1, keepdim=True)) + linear(of_vectors, self.vectors.t())).to(dtype or x.dtype)

    @property
    def declaration(self) -> Declaration:
        """Declare logical names and saved tensors."""
        return Declaration(
            logical_names={"vectors": (None, "embed"), "mixing": (None, None, "embed")},
            saved_tensors=self._saved_tensors,
        )

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        """Describe the saved tensors; `MoE` declares the input and its factors, the router the expert ids."""
        config = self.config

        def saved(width: int, dtype: torch.dtype) -> SavedTensor:
            return SavedTensor((batch, length, width), (*TOKEN_DIMS, None), dtype)

        tensors = {"is_no_copy": saved(config.top_k, torch.bool)}
        if self.vectors is not None:
            count, wide = config.num_constant_experts, torch.promote_types(self.vectors.dtype, torch.float32)
            tensors["is_no_constant"] = saved(config.top_k, torch.bool)
            tensors["index"] = saved(config.top_k, torch.int64)
            tensors["weights"] = saved(count, wide)
            tensors["shares"] = saved(2 * count, wide)
            tensors["of_vectors"] = saved(2 * count, wide)
        return tensors
