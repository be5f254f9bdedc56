"""Gates that are clipped after the activation, as in Step-3.7."""

from typing import Any

from maxmoe.checks.fields import check_number
from maxmoe.components import ActivationRule, component
from maxmoe.config import MoEConfig


@component
class LimitedOutput(ActivationRule):
    """SwiGLU with min(silu(gate), limit) * clamp(up, -limit, limit), as in Step-3.7.

    Args:
        limit: limit of the routed experts; None for no clipping.
        shared_limit: limit of the shared experts; None for no clipping.

    Source: Step-3.7 in transformers.
    """

    limit: float | None = None
    shared_limit: float | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "shared_limit"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)

    def check(self, config: MoEConfig) -> None:
        """Raise without a gate, with the limit of other families, and for a limit of absent experts."""
        config.require("activation=LimitedOutput(...)", gated=True, activation_limit=None)
        if self.shared_limit is not None and config.num_shared_experts == 0:
            raise ValueError(f"shared_limit ({self.shared_limit}) needs num_shared_experts >= 1, got 0")

    def arguments(self, config: MoEConfig, *, of_shared: bool) -> dict[str, Any]:
        """Return SiLU with the limit of its output."""
        limit = self.shared_limit if of_shared else self.limit
        return {"activation": "silu", "limit": limit, "limit_target": "input" if limit is None else "output"}
