"""Gates and activations of transformers: mapping to `maxmoe.ops.expert_ffn`, and application of all others."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional
from transformers import activations

from maxmoe._torch import has_hooks
from maxmoe.config import Activation
from maxmoe.declaration import gate_up_slices
from maxmoe.integrations.transformers._transformers import own_gate, own_gate_name

# Arguments of `maxmoe.ops.expert_ffn`: activation and limit.
Options: TypeAlias = dict[str, Any]


def fused_gate(experts: Any) -> Options | None:
    """Return the arguments of `expert_ffn` for the gate and activation of experts; None if it does not support them."""
    if experts.has_gate and (name := own_gate_name(experts)) is not None:
        recognise = _FAMILY_GATES.get(name.removeprefix("transformers.models."))
        return None if recognise is None else recognise(experts)
    return recognise_activation(experts.act_fn)


def apply_gate(experts: Any, projected: Tensor) -> Tensor:
    """Apply gate and activation of a family to ``(R, 2F)``, gate and up in its layout, or ``(R, F)`` without a gate."""
    if not experts.has_gate:
        activated: Tensor = experts.act_fn(projected)
    elif experts.is_concatenated or own_gate_name(experts) is not None:
        activated = own_gate(experts, projected)
    else:  # the default gate of transformers supports only the concatenated layout
        gate, up = (projected[..., part] for part in gate_up_slices(projected.shape[-1], "interleaved"))
        activated = experts.act_fn(gate) * up
    return activated


def recognise_activation(function: Any, limit: float | None = None) -> Options | None:
    """Return the arguments of `expert_ffn` for an activation with clipping; None if it does not support it."""
    is_module = isinstance(function, nn.Module)
    if is_module and has_hooks(function):
        return None  # the operator would not call the hooks
    name = _ACTIVATIONS.get(type(function) if is_module else function)
    return None if name is None else {"activation": name, "limit": limit}


def _swigluoai(alpha: float, limit: float) -> Options | None:
    return {"activation": "swigluoai", "limit": limit} if alpha == 1.702 else None


def _silu(limit: float) -> Options:
    return {"activation": "silu", "limit": limit}


# Exact types, because a derived class may compute something else.
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

# Gates that families of transformers.models define themselves and `expert_ffn` supports.
_FAMILY_GATES: dict[str, Callable[[Any], Options | None]] = {
    # silu(gate) * up in float32, as `expert_ffn` computes it.
    "beam.modeling_beam.BeamExperts._apply_gate": lambda experts: recognise_activation(experts.act_fn),
    "deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts._apply_gate": lambda experts: recognise_activation(
        experts.act_fn, experts.limit
    ),
    "glm5_next.modeling_glm5_next.Glm5NextTextExperts._apply_gate": lambda experts: _silu(experts.swiglu_limit),
    "gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": lambda experts: _swigluoai(experts.alpha, experts.limit),
    "hy_v4.modeling_hy_v4.HYV4Experts._apply_gate": lambda experts: _silu(experts.swiglu_limit),
    "minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": lambda experts: _swigluoai(
        experts.swiglu_alpha, experts.swiglu_limit
    ),
    "openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate": lambda experts: (
        _swigluoai(experts.alpha, experts.limit)
    ),
}
