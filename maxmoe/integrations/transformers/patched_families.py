"""Families whose experts take no experts implementation in transformers: their classes are patched.

The experts take the plan of a replaced block. The block of Llama 4 and the experts of Step-3.7 support "maxmoe".
Whatever else the models compute is unchanged.
"""

import importlib.util
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation
from transformers.models.dbrx.modeling_dbrx import DbrxExpertGLU, DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoA, JetMoeMoE, JetMoeParallelExperts
from transformers.models.llama4.modeling_llama4 import Llama4PreTrainedModel, Llama4TextExperts, Llama4TextMoe
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersExperts

from maxmoe.adapters import factors_of, without_adapters
from maxmoe.declaration import finds_expert_matrices
from maxmoe.integrations.transformers._transformers import allow_experts_implementation, experts_implementation
from maxmoe.integrations.transformers.experts import experts_forward
from maxmoe.integrations.transformers.gates import Options, recognise_activation
from maxmoe.nn import ExpertWeights, ForeignExperts
from maxmoe.ops import Projection, RaggedPlan, expert_ffn, gmm, ragged_plan


def register() -> None:
    """Patch the classes."""
    _take_plans(LongcatFlashExperts, _longcat_flash)
    _take_plans(Llama4TextExperts, _llama4)
    _take_plans(DbrxExperts, _dbrx)
    _take_plans(SwitchTransformersExperts, _switch_transformers)
    _take_rows(JetMoeParallelExperts)
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
    """Interface for a class that has none in transformers: "maxmoe" is ours, every other name the class's own code."""

    def get_interface(self, name: str | None, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return experts_forward if name == "maxmoe" else own


def is_sparse_block(module: nn.Module) -> bool:
    """Return whether a module has experts that are not the attention heads of JetMoE."""
    experts = dict(module.named_children()).get("experts")
    return isinstance(module, JetMoeMoE) or not isinstance(experts, JetMoeMoA | None)


def _take_plans(kind: Any, weights_of: Callable[[Any], tuple[ExpertWeights, Any, Options]]) -> None:
    """Let experts of a class take rows ``(R, D)``, their plan and weights as well.

    `weights_of` views their parameters, and returns their activation and further arguments of `expert_ffn`.
    """
    forward = kind.forward

    @wraps(forward)
    def chosen(
        experts: Any, x: Tensor, plan: Any = None, weights: Tensor | None = None, foreign: ForeignExperts | None = None
    ) -> Tensor:
        if not isinstance(plan, RaggedPlan):
            output: Tensor = forward(experts, x, *(() if plan is None else (plan, weights)))
            return output
        own, activation, options = weights_of(experts)
        gate = recognise_activation(activation)
        assert gate is not None  # the block of Llama 4 has checked it, and the config of a replaced block
        gate = {**gate, **options}

        def compute(matrices: ExpertWeights, plan: RaggedPlan) -> Tensor:
            return expert_ffn(x, weights, plan, *matrices, **gate)

        return compute(own, plan) if foreign is None else foreign.compute(compute, own, plan)

    kind.forward = chosen


def _longcat_flash(experts: Any) -> tuple[ExpertWeights, Any, Options]:
    up = Projection(experts.gate_up_proj[: experts.num_routed_experts].mT)  # the matrices after them are unused
    return ExpertWeights(None, up, Projection(experts.down_proj.mT)), experts.act_fn, {"fused_gate": "concatenated"}


def _llama4(experts: Any) -> tuple[ExpertWeights, Any, Options]:
    up, down = (
        Projection(getattr(experts, name), factors=factors_of(experts, name)) for name in ("gate_up_proj", "down_proj")
    )
    return ExpertWeights(None, up, down), experts.act_fn, {"fused_gate": "concatenated"}


def _dbrx(experts: Any) -> tuple[ExpertWeights, Any, Options]:
    mlp = _unadapted(experts.mlp, DbrxExpertGLU)
    gate, up, down = (each.unflatten(0, (-1, mlp.ffn_hidden_size)) for each in (mlp.w1, mlp.v1, mlp.w2))
    return ExpertWeights(Projection(gate.mT), Projection(up.mT), Projection(down)), mlp.activation_fn, {}


def _switch_transformers(experts: Any) -> tuple[ExpertWeights, Any, Options]:
    """Copy the matrices, each of which is a parameter of its own, into two stacks."""
    up, down = (
        Projection(torch.stack([_unadapted(getattr(expert, name), nn.Linear).weight for expert in experts.values()]).mT)
        for name in ("wi", "wo")
    )
    return ExpertWeights(None, up, down), experts.expert_0.act, {}


def _unadapted(module: Any, kind: type[nn.Module]) -> Any:
    """Return a module whose parameters are read; raise if its own forward would compute something else with them."""
    if type(module) is not kind:
        raise ValueError(
            f"the experts of a replaced block must have matrices in a {kind.__name__}, got {type(module).__name__}: "
            "merge or remove adapters of experts before"
        )
    return module


def _take_rows(kind: Any) -> None:
    """Let a stack of matrices of JetMoE take sorted rows ``(R, in)`` and their plan as well."""
    forward = kind.forward

    @wraps(forward)
    def chosen(matrices: Any, rows: Tensor, plan: Any) -> Tensor:
        if isinstance(plan, RaggedPlan):
            return gmm(rows, matrices.weight.mT, plan.group_sizes)
        output: Tensor = forward(matrices, rows, plan)
        return output

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
