"""LongCat-Flash, whose experts have no experts implementations: their class is patched for replaced blocks."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.models.longcat_flash import modeling_longcat_flash

from maxmoe.integrations.transformers.gates import recognise_activation
from maxmoe.ops import RaggedPlan, expert_ffn


def register() -> None:
    """Let the experts take the plan of a replaced block. What the model itself computes is unchanged."""
    experts: Any = modeling_longcat_flash.LongcatFlashExperts
    experts.forward = _or_rows(experts.forward)


def _or_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(forward)
    def chosen(experts: Any, hidden_states: Tensor, plan: Any, weights: Tensor | None) -> Tensor:
        if not isinstance(plan, RaggedPlan):
            return forward(experts, hidden_states, plan, weights)
        gate = recognise_activation(experts.act_fn)
        assert gate is not None  # the config of the family allows silu alone
        return expert_ffn(
            hidden_states,
            weights,
            plan,
            None,
            experts.gate_up_proj[: experts.num_routed_experts].mT,  # those after them have no use
            experts.down_proj.mT,
            activation=gate.activation,
            fused_gate="concatenated",
        )

    return chosen
