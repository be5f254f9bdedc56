"""Running a module on a mesh: every rank its own tokens, parameters gathered where and while they are used."""

from typing import Any

from torch import nn

from maxmoe.nn.declaration import declaration_of
from maxmoe.parallel.dispatch_plan import Dispatch
from maxmoe.parallel.fsdp import fully_shard_blocks
from maxmoe.parallel.parameter_hooks import ParameterHooks
from maxmoe.parallel.plan import Plan
from maxmoe.parallel.shard_parameters import distribute_parameters
from maxmoe.parallel.tensor_parallel_hooks import TensorParallelHooks
from maxmoe.sharding.agreement import check_ranks_agree
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.rules import LogicalRules


def parallelize(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules | str = "default",
    *,
    dispatch: Dispatch = "auto",
    num_chunks: int = 1,
    strict: bool = False,
    allow_unused: bool = False,
) -> nn.Module:
    """Shard the parameters of a module, and let it run on every rank's own tokens.

    Afterwards the module takes and returns plain tensors: the sequences that the axes of `activation_batch` give this
    rank, or the parts of them that those of `activation_length` give it; see `token_sharding`. Ranks that differ on
    other axes hold the same tokens. Parameters and their gradients are DTensors. Each rank calls backward on the sum of
    its token losses plus the auxiliary loss, which is global: the gradients are those of the sum over all tokens plus
    the auxiliary loss, once.

    Parameters are gathered before the forward of their gather unit, freed after it, gathered again in the backward, and
    their gradients are reduce-scattered. Where it can, FSDP2 does that for the `fsdp` axis, block by block; see
    `fsdp_managed`. Modules with tensor-parallel dims compute with their own part of the weights and all-reduce their
    output. What modules declare for this is in `Declaration`.

    Use `maxmoe.mean_over_tokens` for the loss: a mean over the tokens of this rank alone, as under DDP and FSDP, gives
    gradients too large by the number of ranks that hold different tokens.

    Compute losses from what modules return. Do not backpropagate from tensors captured by forward hooks: the gathered
    weights are freed.

    Args:
        module: with logical names, see `Declaration`.
        mesh: of the ranks.
        rules: the table, or the name of a preset.
        dispatch: how tokens reach experts on other ranks. "ring_of_experts": every rank gets all tokens and computes
            those of its experts. "ragged_all_to_all": every rank gets the rows of its experts. "auto": the one of the
            two that moves fewer bytes. "gather_weights": tokens stay, every rank gathers all experts.
        num_chunks: parts of the tokens of a MoE layer, of which one is communicated while another is computed.
        strict: see `parameter_shardings`.
        allow_unused: accept mesh axes that no rule has, and rules with names or axes that nothing else has; they have
            no effect, and most are typos.

    Returns:
        The module.

    Raises:
        ValueError: as `shard_parameters`; if the rules shard sequences that a layer needs whole; on every rank,
            if meshes, rules, modules, their parameters, `dispatch` or `num_chunks` differ between ranks.
    """
    rules = LogicalRules.load(rules)
    facts = {
        "the mesh": repr(mesh),
        "dispatch": repr(dispatch),
        "num_chunks": repr(num_chunks),
        **_facts(module, rules),
    }
    check_ranks_agree(facts, mesh.device_mesh.device_type)
    plan = Plan(module, mesh, rules, strict=strict, allow_unused=allow_unused, dispatch=dispatch)
    _check_whole_sequences(plan)
    _check_chunks(plan, num_chunks)
    distribute_parameters(module, {name: parameter.unsharded for name, parameter in plan.parameters.items()})
    for child in plan.modules.values():
        if declaration_of(child).uses_token_group:
            child.token_group = plan.tokens
    for path, dispatch_plan in plan.dispatch_plans.items():
        layer: Any = plan.modules[path]
        layer.dispatcher, layer.boundary = dispatch_plan.dispatcher(), dispatch_plan.boundary()
        layer.num_chunks = num_chunks
    for unit, names in plan.gather_units.items():
        ParameterHooks({path: plan.parameters[name] for path, name in names.items()}).register(unit)
        if plan.tensor_parallel_axes[unit] and unit not in plan.reduced_by_layer:
            TensorParallelHooks(mesh, plan.tensor_parallel_axes[unit]).register(unit)
    fully_shard_blocks(module, mesh, plan.fsdp_managed)
    return module


def _facts(module: nn.Module, rules: LogicalRules) -> dict[str, str]:
    """What the collectives of a parallelized module depend on."""
    facts = {"the rules": repr(rules)}
    for path, child in module.named_modules():
        facts[f"the module {path or '(root)'}"] = f"{type(child).__name__}({child.extra_repr()})"
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        facts[path] = f"shape {tuple(tensor.shape)}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
    return facts


def _check_chunks(plan: Plan, num_chunks: int) -> None:
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be positive, got {num_chunks}")
    for path, dispatch_plan in plan.dispatch_plans.items():
        if num_chunks > 1 and dispatch_plan.config.capacity_factor is not None:
            raise ValueError(
                f"num_chunks must be 1 for {path or 'a layer'} with capacity_factor, which is per sequence, "
                f"got {num_chunks}"
            )


def _check_whole_sequences(plan: Plan) -> None:
    for path, child in plan.modules.items():
        if plan.tokens.length_axes and declaration_of(child).needs_whole_sequences:
            raise ValueError(
                f"{path or type(child).__name__} needs whole sequences, sharded here over {plan.tokens.length_axes}"
            )
