"""Families that have no experts implementations in transformers: their classes are patched.

The experts of Llama 4 and LongCat-Flash take the plan of a replaced block. The block of Llama 4 and the experts of
Step-3.7 support "maxmoe". Whatever else the models compute is unchanged.
"""

import importlib.util
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation
from transformers.models.llama4.modeling_llama4 import Llama4PreTrainedModel, Llama4TextExperts, Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from maxmoe.adapters import factors_of, without_adapters
from maxmoe.declaration import finds_expert_matrices
from maxmoe.integrations.transformers._transformers import allow_experts_implementation, experts_implementation
from maxmoe.integrations.transformers.experts import experts_forward
from maxmoe.integrations.transformers.gates import recognise_activation
from maxmoe.ops import Projection, RaggedPlan, expert_ffn, ragged_plan


def register() -> None:
    """Patch the classes."""
    _take_plans(LongcatFlashExperts, _of_longcat_flash)
    _take_plans(Llama4TextExperts, _of_llama4)
    block: Any = Llama4TextMoe
    block.forward = _or_maxmoe(block.forward)
    allow_experts_implementation(Llama4PreTrainedModel)
    finds_expert_matrices(_expert_matrices)
    if importlib.util.find_spec("transformers.models.step3p7"):  # from 5.24 on
        _implement_step3p7()


def _implement_step3p7() -> None:
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7PreTrainedModel

    use_experts_implementation(Step3p7Experts, experts_interface=_OwnOrMaxmoe())  # type: ignore[arg-type]
    allow_experts_implementation(Step3p7PreTrainedModel)


class _OwnOrMaxmoe:
    """Experts implementations for a class that transformers gives none: other names leave its own code."""

    def get_interface(self, name: str | None, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return experts_forward if name == "maxmoe" else own


def _of_longcat_flash(experts: Any, name: str) -> Projection:
    return Projection(getattr(experts, name)[: experts.num_routed_experts].mT)  # those after them have no use


def _of_llama4(experts: Any, name: str) -> Projection:
    return Projection(getattr(experts, name), factors=factors_of(experts, name))


def _take_plans(kind: Any, projection: Callable[[Any, str], Projection]) -> None:
    """Let experts of a class take rows ``(R, D)``, their plan and weights as well; `projection` views a parameter."""
    forward = kind.forward

    @wraps(forward)
    def chosen(experts: Any, hidden_states: Tensor, plan: Any = None, weights: Tensor | None = None) -> Tensor:
        if not isinstance(plan, RaggedPlan):
            output: Tensor = forward(experts, hidden_states, *(() if plan is None else (plan, weights)))
            return output
        gate = recognise_activation(experts.act_fn)
        assert gate is not None  # LongCat-Flash allows silu alone, and the block of Llama 4 has checked it
        up, down = (projection(experts, name) for name in ("gate_up_proj", "down_proj"))
        return expert_ffn(hidden_states, weights, plan, None, up, down, fused_gate="concatenated", **gate)

    kind.forward = chosen


def _expert_matrices(module: nn.Module) -> dict[str, bool]:
    # The block alone knows its implementation, and says it in its forward: before, weights may be quantized.
    is_other = not getattr(module, "uses_maxmoe", True) or not isinstance(module, Llama4TextExperts)
    return {} if is_other else {"gate_up_proj": True, "down_proj": True}


def _or_maxmoe(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def chosen(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the routed slots only, instead of every expert on every token. The weights scale the inputs."""
        experts: Any = without_adapters(block.experts, Llama4TextExperts)
        uses_maxmoe = experts_implementation(block.shared_expert.config) == "maxmoe"
        experts.uses_maxmoe = uses_maxmoe and recognise_activation(experts.act_fn) is not None
        if not experts.uses_maxmoe:
            output: tuple[Tensor, Tensor] = forward(block, hidden_states)
            return output
        x = hidden_states.reshape(-1, block.hidden_dim)
        scores, router_logits = block.router(x)
        selected = router_logits.topk(block.top_k, dim=1).indices  # as the router does
        slots = (x.unsqueeze(1) * scores.gather(1, selected).unsqueeze(2)).flatten(0, 1)
        plan = ragged_plan(selected.reshape(-1, 1), block.num_experts, num_rows=selected.numel())
        # A call of the module, so that adapters around it take part.
        out = block.experts(slots, plan)
        return block.shared_expert(x) + out.view(*selected.shape, -1).sum(1), router_logits

    return chosen
