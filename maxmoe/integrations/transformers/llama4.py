"""Llama 4, which has no experts implementations in transformers: its block is patched to support "maxmoe"."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers.models.llama4 import modeling_llama4

from maxmoe.adapters import factors_of, without_adapters
from maxmoe.declaration import finds_expert_matrices
from maxmoe.integrations.transformers._transformers import allow_experts_implementation, experts_implementation
from maxmoe.integrations.transformers.gates import FusedGate, recognise_activation
from maxmoe.ops import Projection, RaggedPlan, expert_ffn, ragged_plan

Forward = Callable[..., Any]


def register() -> None:
    """Patch Llama 4 to support "maxmoe". Other implementations are unchanged."""
    block: Any = modeling_llama4.Llama4TextMoe
    block.forward = _or_maxmoe(block.forward)
    experts: Any = modeling_llama4.Llama4TextExperts
    experts.forward = _or_rows(experts.forward)
    allow_experts_implementation(modeling_llama4.Llama4PreTrainedModel)
    finds_expert_matrices(_expert_matrices)


def _expert_matrices(module: nn.Module) -> dict[str, bool]:
    # The block alone knows its implementation, and says it in its forward: before, weights may be quantized.
    is_other = not getattr(module, "uses_maxmoe", True) or not isinstance(module, modeling_llama4.Llama4TextExperts)
    return {} if is_other else {"gate_up_proj": True, "down_proj": True}


def _or_maxmoe(forward: Forward) -> Forward:
    @wraps(forward)
    def chosen(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        experts: Any = without_adapters(block.experts, modeling_llama4.Llama4TextExperts)
        uses_maxmoe = experts_implementation(block.shared_expert.config) == "maxmoe"
        experts.uses_maxmoe = uses_maxmoe and recognise_activation(experts.act_fn) is not None
        if not experts.uses_maxmoe:
            output: tuple[Tensor, Tensor] = forward(block, hidden_states)
            return output
        return _forward(block, hidden_states)

    return chosen


def _forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the routed slots only, instead of every expert on every token. The weights scale the expert inputs."""
    x = hidden_states.reshape(-1, block.hidden_dim)
    scores, router_logits = block.router(x)
    experts = router_logits.topk(block.top_k, dim=1).indices  # as the router does
    slots = (x.unsqueeze(1) * scores.gather(1, experts).unsqueeze(2)).flatten(0, 1)
    plan = ragged_plan(experts.reshape(-1, 1), block.num_experts, num_rows=experts.numel())
    # A call of the module, so that adapters around it take part.
    out = block.experts(slots, plan)
    routed = out.view(*experts.shape, -1).sum(1)
    return block.shared_expert(x) + routed, router_logits


def _uses_maxmoe(experts: Any) -> bool:
    return bool(getattr(experts, "uses_maxmoe", False))


def _or_rows(forward: Forward) -> Forward:
    """Return a forward of the experts that takes rows ``(R, D)`` and their plan as well."""

    @wraps(forward)
    def chosen(
        experts: Any, hidden_states: Tensor, plan: RaggedPlan | None = None, weights: Tensor | None = None
    ) -> Tensor:
        if plan is None:
            output: Tensor = forward(experts, hidden_states)
            return output
        gate: FusedGate = recognise_activation(experts.act_fn)  # type: ignore[assignment]  # the block has checked it
        return expert_ffn(
            hidden_states,
            weights,
            plan,
            None,
            Projection(experts.gate_up_proj, factors=factors_of(experts, "gate_up_proj")),
            Projection(experts.down_proj, factors=factors_of(experts, "down_proj")),
            activation=gate.activation,
            fused_gate="concatenated",
        )

    return chosen
