"""Llama 4, which has no experts implementations in transformers: its block is patched to support "maxmoe"."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.models.llama4 import modeling_llama4

from maxmoe.integrations.transformers._transformers import allow_experts_implementation, experts_implementation
from maxmoe.integrations.transformers.gates import FusedGate, recognise_activation
from maxmoe.ops import expert_ffn, ragged_plan

Forward = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


def register() -> None:
    """Patch Llama 4 to support "maxmoe". Other implementations are unchanged."""
    block: Any = modeling_llama4.Llama4TextMoe
    block.forward = _or_maxmoe(block.forward)
    allow_experts_implementation(modeling_llama4.Llama4PreTrainedModel)


def _or_maxmoe(forward: Forward) -> Forward:
    @wraps(forward)
    def chosen(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        gate = recognise_activation(block.experts.act_fn)
        if experts_implementation(block.shared_expert.config) != "maxmoe" or gate is None:
            return forward(block, hidden_states)
        return _forward(block, hidden_states, gate)

    return chosen


def _forward(block: Any, hidden_states: Tensor, gate: FusedGate) -> tuple[Tensor, Tensor]:
    """Compute the routed slots only, instead of every expert on every token. The weights scale the expert inputs."""
    x = hidden_states.reshape(-1, block.hidden_dim)
    scores, router_logits = block.router(x)
    experts = router_logits.topk(block.top_k, dim=1).indices  # as the router does
    slots = (x.unsqueeze(1) * scores.gather(1, experts).unsqueeze(2)).flatten(0, 1)
    out = expert_ffn(
        slots,
        None,
        ragged_plan(experts.reshape(-1, 1), block.num_experts, num_rows=experts.numel()),
        None,
        block.experts.gate_up_proj,
        block.experts.down_proj,
        activation=gate.activation,
        fused_gate="concatenated",
    )
    routed = out.view(*experts.shape, -1).sum(1)
    return block.shared_expert(x) + routed, router_logits
