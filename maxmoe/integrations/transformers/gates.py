"""The gates and activations of transformers: those that `maxmoe.ops.expert_ffn` has, and how to apply all others."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from transformers import activations

from maxmoe._torch import has_hooks
from maxmoe.config import Activation
from maxmoe.declaration import gate_up_slices
from maxmoe.integrations.transformers._transformers import gate_name, has_own_gate, own_gate


class FusedGate(NamedTuple):
    """Arguments of `maxmoe.ops.expert_ffn`."""

    activation: Activation
    limit: float | None = None


def fused_gate(experts: Any) -> FusedGate | None:
    """Recognise the gate and activation of experts, by their classes.

    Args:
        experts: decorated with `transformers.integrations.use_experts_implementation`.

    Returns:
        What `maxmoe.ops.expert_ffn` calls them, None if it has them not.
    """
    if experts.has_gate and has_own_gate(experts):
        recognise = _FAMILY_GATES.get(gate_name(experts))
        return None if recognise is None else recognise(experts)
    return recognise_activation(experts.act_fn)


def apply_gate(experts: Any, projected: Tensor) -> Tensor:
    """Apply the gate and activation of experts as their family does.

    f(gate) * up;  f(projected) without a gate;  the family's own gate where it has one

    Args:
        experts: decorated with `transformers.integrations.use_experts_implementation`.
        projected: ``(R, 2F)``, gate and up in the layout of `experts`, or ``(R, F)`` without a gate.

    Returns:
        ``(R, F)``.
    """
    if not experts.has_gate:
        activated: Tensor = experts.act_fn(projected)
    elif experts.is_concatenated or has_own_gate(experts):
        activated = own_gate(experts, projected)
    else:  # the gate that transformers gives to classes without one knows the other layout only
        gate, up = (projected[..., part] for part in gate_up_slices(projected.shape[-1], "interleaved"))
        activated = experts.act_fn(gate) * up
    return activated


def recognise_activation(function: Any, limit: float | None = None) -> FusedGate | None:
    """Recognise an activation by its class.

    Args:
        function: `act_fn` of experts.
        limit: of the clipping around it.

    Returns:
        What `maxmoe.ops.expert_ffn` calls it, None if it has it not.
    """
    is_module = isinstance(function, nn.Module)
    if is_module and has_hooks(function):
        return None  # the operator would not call them
    name = _ACTIVATIONS.get(type(function) if is_module else function)
    return None if name is None else FusedGate(name, limit)


def _swigluoai(alpha: float, limit: float) -> FusedGate | None:
    return FusedGate("swigluoai", limit) if alpha == 1.702 else None


# Exact types: a class derived from one of them may compute something else.
_ACTIVATIONS: dict[object, Activation] = {
    activations.SiLUActivation: "silu",
    nn.SiLU: "silu",
    functional.silu: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    nn.ReLU: "relu",
    activations.ReLUSquaredActivation: "relu2",
}

_MODELS = "transformers.models"
# The gates that families write themselves and the operator has: clipped ones.
_FAMILY_GATES: dict[str, Callable[[Any], FusedGate | None]] = {
    f"{_MODELS}.deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts._apply_gate": (
        lambda experts: recognise_activation(experts.act_fn, experts.limit)
    ),
    f"{_MODELS}.glm5_next.modeling_glm5_next.Glm5NextTextExperts._apply_gate": (
        lambda experts: FusedGate("silu", experts.swiglu_limit)
    ),
    f"{_MODELS}.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": (
        lambda experts: _swigluoai(experts.alpha, experts.limit)
    ),
    f"{_MODELS}.hy_v4.modeling_hy_v4.HYV4Experts._apply_gate": (
        lambda experts: FusedGate("silu", experts.swiglu_limit)
    ),
    f"{_MODELS}.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": (
        lambda experts: _swigluoai(experts.swiglu_alpha, experts.swiglu_limit)
    ),
    f"{_MODELS}.openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate": (
        lambda experts: _swigluoai(experts.alpha, experts.limit)
    ),
}
