"""Normalization of the routing weights by a bounded sum, in a few families."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from maxmoe.checks.fields import check_number
from maxmoe.config import MoEConfig
from maxmoe.config.components import RouterRule, Scored, Weighed, component


@component
class SumNormalization(RouterRule):
    """Router whose weights are scores / max(sum + eps, minimum), with the sum over the K selected scores.

    Args:
        eps: constant beside the sum, as in LFM2.
        minimum: lower bound of the divisor, as in ERNIE 4.5.

    Source: LFM2-MoE and ERNIE 4.5 in transformers.
    """

    eps: float = 0.0
    minimum: float = 0.0

    normalizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("eps", "minimum"):
            check_number(name, getattr(self, name), at_least=0)
        if self.eps == self.minimum == 0:
            raise ValueError("eps or minimum must be > 0, so that no weight is divided by zero, got 0 for both")

    def check(self, config: MoEConfig) -> None:
        """Raise without a normalization by the sum."""
        config.require(str(self), normalization="sum")

    def weigh(self, config: MoEConfig, weights: Tensor, of_shared: Tensor | None) -> Weighed:
        """Divide the scores by their sum."""
        divisor = (weights.sum(1, keepdim=True) + self.eps).clamp_min(self.minimum)
        return weights * (config.routed_scaling_factor / divisor), None

    def reference_weights(self, config: MoEConfig, scored: Scored, parameters: Mapping[str, Tensor]) -> Weighed:
        """Divide the scores by their sum, token by token."""
        rows = []
        for row in scored.weights:
            total = row.sum() / config.routed_scaling_factor + self.eps
            rows.append(row / (total if total > self.minimum else self.minimum))
        return torch.stack(rows) if rows else scored.weights, None
