"""Router: the experts of each token and their routing weights."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from maxmoe._torch import ConvertedModule
from maxmoe.config import MoEConfig
from maxmoe.declaration import TOKEN_DIMS, Declaration, SavedTensor
from maxmoe.nn.module_path import module_path
from maxmoe.ops.linear import linear
from maxmoe.ops.route import route


class TopK(NamedTuple):
    """Expert ids and routing weights of tokens.

    Attributes:
        weights: ``(T, K)``, float32 or wider, routing weights; 0 where `experts` is -1.
        experts: ``(T, K)``, int64, expert ids; -1 for a slot that is not routed.
        is_unpadded: whether all slots are known to be routed, so that their number is known without reading `experts`.
    """

    weights: Tensor
    experts: Tensor
    is_unpadded: bool = False

    def tensor_split(self, sections: int) -> list["TopK"]:
        """Split along the tokens, as `torch.tensor_split` does."""
        parts = zip(self.weights.tensor_split(sections), self.experts.tensor_split(sections), strict=True)
        return [TopK(weights, experts, self.is_unpadded) for weights, experts in parts]


class Routing(NamedTuple):
    """Output of the router.

    Attributes:
        logits: ``(T, E)``, float32 or wider, logits of all experts.
        probabilities: ``(T, E)``, scores of all experts, divided by their sum; see `maxmoe.ops.route`.
        weights: ``(T, K)``, float32 or wider, routing weights; 0 where `experts` is -1.
        experts: ``(T, K)``, int64, expert ids; -1 for a slot that is not routed.
        token_mask: ``(T,)``, bool, False for padding; None for no padding.
        is_unpadded: whether all slots are known to be routed, so that their number is known without reading `experts`.
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    experts: Tensor
    token_mask: Tensor | None = None
    is_unpadded: bool = True

    @property
    def top_k(self) -> TopK:
        """Expert ids and routing weights, the input of dispatchers."""
        return TopK(self.weights, self.experts, self.is_unpadded)


def _without_padding(routing: Routing, token_mask: Tensor) -> Routing:
    """Remove padding from a routing. Its probabilities are zeroed, so that it does not contribute to the losses."""
    is_padding = ~token_mask.unsqueeze(1)
    return Routing(
        routing.logits,
        routing.probabilities.masked_fill(is_padding, 0.0),
        routing.weights.masked_fill(is_padding, 0.0),
        routing.experts.masked_fill(is_padding, -1),
        token_mask,
        is_unpadded=False,
    )


class Router(ConvertedModule):
    """Linear map to logits, then `maxmoe.ops.route`, both in float32 or wider for any dtype of the input.

    logits = x @ weight^T + bias

    Args:
        config: config of the layer.
        device: device of the parameters.
        dtype: dtype of the parameters; `score_correction_bias` is float32 or wider.
    """

    weight: Tensor
    bias: Tensor | None
    score_correction_bias: Tensor | None

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        if config.router_bias:
            self.bias = nn.Parameter(torch.empty(config.num_experts, device=device, dtype=dtype))
        correction_bias = None
        if config.score_correction_bias:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            correction_bias = torch.empty(config.num_experts, device=device, dtype=wide)
        self.register_buffer("score_correction_bias", correction_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize biases to zero and the weight such that inputs of variance one give logits of variance one."""
        nn.init.normal_(self.weight, std=self.config.hidden_size**-0.5)
        for bias in (self.bias, self.score_correction_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, token_mask: Tensor | None = None, experts: Tensor | None = None) -> Routing:
        """Route tokens.

        Args:
            x: ``(T, D)``, floating, tokens; must be finite where `token_mask` is False.
            token_mask: ``(T,)``, bool, False for padding, which is not routed.
            experts: ``(T, K)``, int64, experts to route to, -1 for none; the weights come from their scores. None to
                choose the experts with the best scores.

        Returns:
            Logits, probabilities, weights and expert ids.

        Raises:
            ValueError: for NaN scores, with the path of the router in the model.
        """
        config = self.config
        logits = linear(x, self.weight, self.bias)
        if config.router == "random":
            # The values are noise, but the gradient flows to the logits: a balanced load with the cost of training.
            logits = logits + (torch.randn_like(logits) - logits).detach()
        is_unpadded = experts is None
        try:
            weights, experts, probabilities = route(
                logits,
                config.top_k,
                score_function=config.score_function,
                correction_bias=self.score_correction_bias,
                num_groups=config.num_groups,
                top_k_groups=config.top_k_groups,
                group_score=config.group_score,
                normalization=config.normalization,
                scale=config.routed_scaling_factor,
                experts=experts,
            )
        except ValueError as error:
            raise ValueError(f"{module_path(self)}: {error}") from error
        routing = Routing(logits, probabilities, weights, experts, is_unpadded=is_unpadded)
        return routing if token_mask is None else _without_padding(routing, token_mask)

    @property
    def declaration(self) -> Declaration:
        """Declare logical names and saved tensors."""
        return Declaration(
            logical_names={"weight": (None, "embed"), "bias": (None,)}, saved_tensors=self._saved_tensors
        )

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        """Describe the saved tensors; `MoE` declares the input."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return {
            "logits": SavedTensor((batch, length, self.config.num_experts), (*TOKEN_DIMS, None), wide),
            "experts": SavedTensor((batch, length, self.config.top_k), (*TOKEN_DIMS, None), torch.int64),
        }

    def before_conversion(self) -> Callable[[], None]:
        """Keep the correction bias in float32 or wider, because its small updates would be rounded away in 16 bits."""
        before = self.score_correction_bias

        def restore() -> None:
            after = self.score_correction_bias
            if before is not None and after is not None and after.dtype.itemsize < 4:
                self.score_correction_bias = before.to(after.device)

        return restore

    @torch.no_grad()
    def update_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """Update the correction bias so that experts with fewer tokens than the mean are selected more often.

        bias[e] += rate * sign(mean(tokens_per_expert) - tokens_per_expert[e])

        Args:
            tokens_per_expert: ``(E,)``, integer, routed slots of each expert in one optimizer step, summed over its
                micro-batches.

        Raises:
            ValueError: if the layer has no correction bias.

        Source: DeepSeek-V3 (arXiv:2412.19437) section 2.1.2.
        """
        if self.score_correction_bias is None:
            raise ValueError("update_correction_bias needs score_correction_bias=True in the config, got False")
        if tokens_per_expert.shape != self.score_correction_bias.shape:
            raise ValueError(
                f"tokens_per_expert must have shape {tuple(self.score_correction_bias.shape)}, "
                f"got {tuple(tokens_per_expert.shape)}"
            )
        # The sign of mean - count is computed in integers, because large counts are not exact in floating point.
        direction = (tokens_per_expert.sum() - tokens_per_expert * self.config.num_experts).sign()
        self.score_correction_bias += self.config.correction_bias_update_rate * direction

    def extra_repr(self) -> str:
        """Return the sizes and the score function."""
        config = self.config
        return (
            f"hidden_size={config.hidden_size}, num_experts={config.num_experts}, top_k={config.top_k}, "
            f"score_function={config.score_function!r}, bias={config.router_bias}, "
            f"score_correction_bias={config.score_correction_bias}"
        )
