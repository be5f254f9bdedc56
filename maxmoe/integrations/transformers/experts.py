"""The experts implementation "maxmoe"."""

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from maxmoe.adapters import factors_of
from maxmoe.declaration import finds_expert_matrices
from maxmoe.integrations.transformers._transformers import experts_implementation, is_expert_parallel, is_experts
from maxmoe.integrations.transformers.gates import apply_gate, fused_gate
from maxmoe.nn import ExpertWeights, ForeignExperts
from maxmoe.ops import Projection, RaggedPlan, expert_ffn, gmm, ragged_plan, ragged_sort, ragged_unsort


def register() -> None:
    """Register "maxmoe" as an experts implementation of transformers."""
    ALL_EXPERTS_FUNCTIONS.register("maxmoe", experts_forward)
    finds_expert_matrices(_expert_matrices)


def runs_on_maxmoe(module: Any) -> bool:
    """Return whether a module is experts with the implementation "maxmoe", not sharded by transformers."""
    return is_experts(module) and experts_implementation(module.config) == "maxmoe" and not is_expert_parallel(module)


def _expert_matrices(module: Any) -> dict[str, bool]:
    return dict.fromkeys(_stacks(module), bool(module.is_transposed)) if runs_on_maxmoe(module) else {}


def experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor | RaggedPlan,
    top_k_weights: Tensor | None,
    foreign: ForeignExperts | None = None,
) -> Tensor:
    """Experts implementation "maxmoe" for models of transformers.

    out[t] = sum_k top_k_weights[t, k] * expert[top_k_index[t, k]](hidden_states[t])

    Experts whose gate and activation `maxmoe.ops.expert_ffn` supports are computed by it, without a copy of the
    parameters: it reads fused gate and up, and writes their gradients in the same layout. All others are computed by
    `maxmoe.ops.gmm` and the gate, activation and norm of the family.

    Args:
        experts: module decorated with `transformers.integrations.use_experts_implementation`.
        hidden_states: ``(T, D)``, floating.
        top_k_index: ``(T, K)``, int64, in [0, num_experts). Under expert parallelism, indices from num_experts on are
            experts of other ranks. Replaced blocks and our expert parallelism give a plan instead.
        top_k_weights: ``(T, K)``, floating; None for ones.
        foreign: experts of other processes, as in `maxmoe.nn.Experts`; None for none.

    Returns:
        ``(T, D)``, dtype of hidden_states, also under autocast.

    Raises:
        ValueError: for an expert out of range or sizes that do not fit.
    """
    routing_block = experts.__dict__.get("routing_block")  # getattr would call Module.__getattr__
    if routing_block is not None and not isinstance(top_k_index, RaggedPlan):
        top_k_index, top_k_weights = routing_block.route(top_k_index, top_k_weights)
    plan = top_k_index if isinstance(top_k_index, RaggedPlan) else _plan(experts, top_k_index)
    up, down = (_projection(experts, name) for name in _stacks(experts))
    gate = None if experts.has_post_expert_norm else fused_gate(experts)
    if gate is not None:
        if experts.has_gate:
            gate["fused_gate"] = "concatenated" if experts.is_concatenated else "interleaved"
        gate["recompute"] = "experts" in getattr(experts, "recompute", ())

    def compute(weights: ExpertWeights, plan: RaggedPlan) -> Tensor:
        if gate is not None:
            return expert_ffn(hidden_states, top_k_weights, plan, *weights, **gate)
        rows = gmm(ragged_sort(hidden_states, plan), weights.up, plan.group_sizes)
        rows = gmm(apply_gate(experts, rows), weights.down, plan.group_sizes)
        if experts.has_post_expert_norm:
            rows = experts.post_expert_norm(rows)
        return ragged_unsort(rows, plan, top_k_weights)

    own = ExpertWeights(None, up, down)
    out = compute(own, plan) if foreign is None else foreign.compute(compute, own, plan)
    return out.to(hidden_states.dtype)


def _plan(experts: Any, top_k_index: Tensor) -> RaggedPlan:
    if is_expert_parallel(experts):
        is_elsewhere = top_k_index >= experts.num_experts
        return ragged_plan(top_k_index.masked_fill(is_elsewhere, -1), experts.num_experts)
    return ragged_plan(top_k_index, experts.num_experts, num_rows=top_k_index.numel())


def _stacks(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _projection(experts: Any, name: str) -> Projection:
    """View a parameter as [L, in, out], which transformers calls transposed, with its bias and factors."""
    parameter: Tensor = getattr(experts, name)
    return Projection(
        parameter if experts.is_transposed else parameter.mT,
        getattr(experts, f"{name}_bias") if experts.has_bias else None,
        factors_of(experts, name, transposed=not experts.is_transposed),
    )
