"""The router: which experts see a token, and how much each of them counts."""

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
    """The experts of tokens: what dispatch needs of a routing.

    Attributes:
        weights: ``(T, K)``, float32 or wider; 0 where `experts` is -1.
        experts: ``(T, K)``, int64; -1 for a slot that is not routed.
        is_unpadded: whether every slot is known to be routed, so that their number needs no look at `experts`.
    """

    weights: Tensor
    experts: Tensor
    is_unpadded: bool = False

    def tensor_split(self, sections: int) -> list["TopK"]:
        """Split along the tokens, as `torch.tensor_split` does."""
        parts = zip(self.weights.tensor_split(sections), self.experts.tensor_split(sections), strict=True)
        return [TopK(weights, experts, self.is_unpadded) for weights, experts in parts]


class Routing(NamedTuple):
    """What the router decided.

    Attributes:
        logits: ``(T, E)``, float32 or wider.
        probabilities: ``(T, E)``, the scores of every expert, scaled to sum one; see `maxmoe.ops.route`.
        weights: ``(T, K)``, float32 or wider; 0 where `experts` is -1.
        experts: ``(T, K)``, int64; -1 for a slot that is not routed.
        token_mask: ``(T,)``, bool, False for padding; None if there is none.
        is_unpadded: whether every slot is known to be routed, so that their number needs no look at `experts`.
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    experts: Tensor
    token_mask: Tensor | None = None
    is_unpadded: bool = True

    @property
    def top_k(self) -> TopK:
        """What dispatch needs."""
        return TopK(self.weights, self.experts, self.is_unpadded)


def _without_padding(routing: Routing, token_mask: Tensor) -> Routing:
    """Route no padding, and leave it out of all sums over tokens: its probabilities are zero."""
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
    """Logits from a linear map, then `maxmoe.ops.route`; in float32 or wider whatever the input's dtype.

    logits = x @ weight^T + bias

    Args:
        config: of the layer.
        device: of the parameters.
        dtype: of the parameters; `score_correction_bias` is float32 or wider.
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
        """Logits of variance one for inputs of variance one; biases zero."""
        nn.init.normal_(self.weight, std=self.config.hidden_size**-0.5)
        for bias in (self.bias, self.score_correction_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, token_mask: Tensor | None = None, experts: Tensor | None = None) -> Routing:
        """Route tokens.

        Args:
            x: ``(T, D)``, floating; finite where `token_mask` is False.
            token_mask: ``(T,)``, bool, False for padding, which is not routed.
            experts: ``(T, K)``, int64: route to these experts, -1 for none, with the weights that their scores give;
                None to choose the best.

        Returns:
            The routing.

        Raises:
            ValueError: for scores that are not numbers, with the path of the router in the model.
        """
        config = self.config
        logits = linear(x, self.weight, self.bias)
        if config.router == "random":
            # The values are noise, the gradient is that of the logits: the work of real training, in balance.
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
        """See `Declaration`."""
        return Declaration(
            logical_names={"weight": (None, "embed"), "bias": (None,)}, saved_tensors=self._saved_tensors
        )

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        """The input is counted in `MoE`."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return {
            "logits": SavedTensor((batch, length, self.config.num_experts), (*TOKEN_DIMS, None), wide),
            "experts": SavedTensor((batch, length, self.config.top_k), (*TOKEN_DIMS, None), torch.int64),
        }

    def before_conversion(self) -> Callable[[], None]:
        """Keep the correction bias in float32 or wider: its small steps would be lost in 16 bits."""
        before = self.score_correction_bias

        def restore() -> None:
            after = self.score_correction_bias
            if before is not None and after is not None and after.dtype.itemsize < 4:
                self.score_correction_bias = before.to(after.device)

        return restore

    @torch.no_grad()
    def update_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """Move the selection towards experts that got fewer tokens than the mean, without any loss.

        bias[e] += rate * sign(mean(tokens_per_expert) - tokens_per_expert[e])

        Args:
            tokens_per_expert: ``(E,)``, of one optimizer step: summed over micro-batches.

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
        # The sign of mean - count from whole numbers: large counts are not exact in floating point.
        direction = (tokens_per_expert.sum() - tokens_per_expert * self.config.num_experts).sign()
        self.score_correction_bias += self.config.correction_bias_update_rate * direction

    def extra_repr(self) -> str:
        """Sizes and rule, for `print`.

        Returns:
            One line.
        """
        config = self.config
        return (
            f"hidden_size={config.hidden_size}, num_experts={config.num_experts}, top_k={config.top_k}, "
            f"score_function={config.score_function!r}, bias={config.router_bias}, "
            f"score_correction_bias={config.score_correction_bias}"
        )
