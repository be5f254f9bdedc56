"""Gates and activations of transformers: mapping to `maxmoe.ops.expert_ffn`, and application of all others."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional
from transformers import activations

from maxmoe._torch import are_called_plainly
from maxmoe.config import LimitTarget
from maxmoe.config.components import Activation
from maxmoe.declaration import gate_up_slices
from maxmoe.integrations.transformers._transformers import own_gate, own_gate_name

# Arguments of `maxmoe.ops.expert_ffn`: the activation and its constants.
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


def recognise_activation(
    function: Any, limit: float | None = None, limit_target: LimitTarget = "input"
) -> Options | None:
    """Return the arguments of `expert_ffn` for an activation with clipping; None if it does not support it."""
    is_module = isinstance(function, nn.Module)
    if is_module and not are_called_plainly(function):
        return None  # the operator would not call hooks
    name = _ACTIVATIONS.get(type(function) if is_module else function)
    if name is None or (limit is not None and limit <= 0):
        return None
    if limit is None or math.isinf(limit):
        return {"activation": name, "limit": None}
    return {"activation": name, "limit": limit, "limit_target": limit_target}


def _clipped_silu(experts: Any) -> Options | None:
    return recognise_activation(functional.silu, experts.swiglu_limit)


def _swigluoai(alpha: float, limit: float) -> Options | None:
    return {"activation": "swigluoai", "limit": limit} if alpha == 1.702 else None


def _softcapped(swiglu: nn.Module) -> Options | None:
    """SwiGLU of Inkling 2, a module of two softcaps."""
    # By name, so that the family is not imported; exact, because a derived class may compute something else.
    names = {"Inkling2SoftcappedSwiGLU", "Inkling2LoopSoftcappedSwiGLU"}
    caps: list[Any] = [getattr(swiglu, name, None) for name in ("gate_softcap", "up_softcap")]
    kinds = {type(cap).__name__ for cap in caps}
    if type(swiglu).__name__ not in names or not kinds <= {"Inkling2Softcap", "Inkling2LoopSoftcap"}:
        return None
    if not are_called_plainly(*swiglu.modules()):
        return None
    gate_softcap, up_softcap = (cap.softcap for cap in caps)
    return {"activation": "situ", "gate_softcap": gate_softcap, "up_softcap": up_softcap}


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
    "glm5_next.modeling_glm5_next.Glm5NextTextExperts._apply_gate": _clipped_silu,
    "gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": lambda experts: _swigluoai(experts.alpha, experts.limit),
    "hy_v4.modeling_hy_v4.HYV4Experts._apply_gate": _clipped_silu,
    "hy_v4_vl.modeling_hy_v4_vl.HYV4VLExperts._apply_gate": _clipped_silu,
    "inkling2.modeling_inkling2.Inkling2Experts._apply_gate": lambda experts: _softcapped(experts.act_fn),
    "inkling2_loop.modeling_inkling2_loop.Inkling2LoopExperts._apply_gate": lambda experts: _softcapped(experts.act_fn),
    "minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": lambda experts: _swigluoai(
        experts.swiglu_alpha, experts.swiglu_limit
    ),
    "openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate": lambda experts: (
        _swigluoai(experts.alpha, experts.limit)
    ),
    "step3p7.modeling_step3p7.Step3p7Experts._apply_gate": lambda experts: recognise_activation(
        experts.act_fn, experts.limit, "output"
    ),
}
