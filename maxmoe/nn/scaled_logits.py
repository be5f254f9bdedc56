"""Logits times a factor, as in Muse Spark."""

from torch import Tensor

from maxmoe.checks.fields import check_number
from maxmoe.components import RouterRule, component


@component
class ScaledLogits(RouterRule):
    """Router whose logits are scale * (x @ weight^T + bias), as in Muse Spark."""

    scale: float

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0)

    def logits(self, products: Tensor) -> Tensor:
        """Multiply the linear map by the scale."""
        return products * self.scale

    def reference_logits(self, logits: Tensor) -> Tensor:
        """Multiply the linear map by the scale."""
        return self.scale * logits
