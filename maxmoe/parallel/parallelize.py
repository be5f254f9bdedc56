"""`parallelize`: run a module on a mesh, with tokens dispatched to experts and all other parameters gathered."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from maxmoe.adapters import check_adapters, stacked_factors
from maxmoe.declaration import NOTHING, declaration_of
from maxmoe.nn import MoELayer, check_recompute, recompute_of, set_recompute
from maxmoe.parallel.apply.apply import apply_plan
from maxmoe.parallel.apply.input_gradients import InputGradientCheck
from maxmoe.parallel.apply.interruptions import guard_calls
from maxmoe.parallel.apply.other_parallelism import refuse_other_parallelism
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.fsdp_units import SHARD_AXIS
from maxmoe.parallel.plan.parameter_sharding import names_without_rules
from maxmoe.parallel.plan.plan import Plan
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.quantization import QuantizedWeight
from maxmoe.ranks.agreement import check_ranks_agree
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.rules import LogicalRules
from maxmoe.text_table import listed

# Share of the parameters that may be whole on every rank along an axis that could shard them.
WHOLE_SHARE = 0.1


def parallelize(
    module: nn.Module,
    mesh: Mesh,
    rules: LogicalRules | str = "default",
    *,
    dispatch: Dispatch = "auto",
    num_chunks: int = 1,
    recompute: Collection[str] | None = None,
    strict: bool = False,
    allow_unused: bool = False,
) -> nn.Module:
    """Shard the parameters of a module and register the hooks with which it runs on each rank's tokens.

    Afterwards, the module takes and returns plain tensors with the tokens of this rank. The batch is sharded over the
    axes of the rule `activation_batch`, the sequence over the axes of `activation_length`, see `token_sharding`. Ranks
    that differ on other axes only hold the same tokens. Parameters and gradients are DTensors, so the optimizer must be
    made afterwards. Each rank calls backward on its summand of the loss plus the global auxiliary loss. The gradients
    are the gradients of the sum over the ranks, in which the auxiliary loss counts once.

    Experts are sharded over the axes that the rules `exp` and `activation_exp` share. Tokens are dispatched over those
    of these axes that shard the tokens. All other parameters are all-gathered before the forward of their FSDP unit,
    freed after it and gathered again in the backward; their gradients are reduce-scattered. FSDP2 manages the `fsdp`
    axis, block by block, for parameters that it can shard. Modules with tensor-parallel dims compute with their shard
    of the weights and all-reduce their output. If the rules shard `activation_embed`, a `ResidualStream` is sharded as
    well. Modules declare all this in `Declaration`.

    Use ``maxmoe.mean_over_tokens(losses, tokens=token_group(mesh, rules))`` for the loss. With a mean over the tokens
    of this rank only, as under DDP and FSDP, gradients are too large by the number of ranks with different tokens.

    A floating-point input of the module must require a gradient on all ranks or on none; otherwise the forward raises a
    ValueError on every rank.

    Compute losses from the outputs of modules. Do not backpropagate from tensors captured by forward hooks, because
    the gathered weights are freed.

    Args:
        module: module whose parameters have logical names, see `Declaration`.
        mesh: mesh on which the module runs.
        rules: rules that map logical names to mesh axes, or the name of a preset.
        dispatch: strategy for experts on other ranks. With "ring_of_experts", each rank receives all tokens and
            computes its experts' rows. With "ragged_all_to_all", each rank receives the rows of its experts. "auto"
            takes the one of the two that communicates fewer bytes. With "least_loaded", a ragged all-to-all in which
            ranks with few rows also compute rows of other ranks' experts, whose weights they receive for the step.
            Where all ranks hold the same tokens, each of these means one all-reduce of the outputs. With
            "gather_weights", tokens are not communicated and each rank gathers all experts.
        num_chunks: number of chunks of the tokens of a MoE layer; one chunk is communicated while another is computed.
            Layers that do not communicate tokens have one chunk. The bound of `buffer_factor` is per chunk of tokens.
        recompute: names of the parts that are recomputed in the backward, see `maxmoe.set_recompute`; None to keep the
            setting of the module.
        strict: raise for names without rules, parameters without names, and dims that their axes do not divide.
        allow_unused: accept names without effect, most of which are typos: mesh axes that no rule has, and rules with
            names or axes that nothing else has.

    Returns:
        `module`.

    Raises:
        TypeError: if `mesh` is not a `maxmoe.sharding.Mesh`.
        ValueError: as `shard_parameters` and `set_recompute`; for an unknown dispatch or an invalid num_chunks; for a
            mesh with an axis `stage`; for adapters in a MoE layer other than adapters of expert matrices; for trained
            parameters of several dtypes that FSDP2 shards together; if the axes of the experts do not divide their
            number; if the rules shard sequences that a layer needs whole; on every rank, if meshes, modules,
            parameters, rules, dispatch, num_chunks or recompute differ between ranks.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a maxmoe.sharding.Mesh, got {type(mesh).__name__}")
    if mesh.size(STAGE_AXIS) > 1:
        raise ValueError(f"mesh must have no axis {STAGE_AXIS!r}, got {mesh}: maxmoe.pipeline cuts a model into stages")
    rules = LogicalRules.load(rules)
    recompute = recompute_of(module) if recompute is None else recompute
    options = dict[str, Any](dispatch=dispatch, num_chunks=num_chunks, strict=strict, allow_unused=allow_unused)
    check_settings(module, mesh, rules, {**options, "recompute": sorted(map(str, recompute))})
    check_recompute(module, recompute)
    with stacked_factors(module):
        plan = make_plan(module, mesh, rules, **options)
        for warning in plan_warnings(plan, rules) if mesh.rank == 0 else ():  # the plan is equal on all ranks
            warnings.warn(warning, stacklevel=2)
        set_recompute(module, recompute)
        name = type(module).__name__  # FSDP2 replaces the class
        apply_plan(module, plan, num_chunks, InputGradientCheck(module, mesh))
        guard_calls(module, mesh, name)
        refuse_other_parallelism()
        return module


def check_settings(module: nn.Module, mesh: Mesh, rules: LogicalRules, settings: Mapping[str, object]) -> None:
    """Raise on every rank if anything differs on which the collectives of a module depend, and for adapters in layers.

    `settings` has all settings besides the mesh, the rules and the module, by name.
    """
    facts = {"the mesh": repr(mesh), **{name: repr(value) for name, value in settings.items()}}
    facts |= {f"rule {number}": f"{name}: {' '.join(axes) or '-'}" for number, (name, axes) in enumerate(rules)}
    for path, child in module.named_modules():
        facts[f"the module {path or '(root)'}"] = f"{type(child).__name__}({child.extra_repr()})"
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        facts[path] = f"shape {tuple(tensor.shape)}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
    check_ranks_agree(facts, mesh.device_mesh.device_type)
    check_adapters(module, MoELayer)


def plan_warnings(plan: Plan, rules: LogicalRules) -> list[str]:
    """Return warnings of names without rules, modules that may mix sharded sequences, and parameters left whole."""
    shardings = {name: parameter.parameter for name, parameter in plan.parameters.items()}
    others = (undeclared_modules(plan), _whole_parameters(plan, rules))
    return [*names_without_rules(shardings, rules), *filter(None, others)]


def _whole_parameters(plan: Plan, rules: LogicalRules) -> str | None:
    """Return the warning for parameters without names that are more than `WHOLE_SHARE` of all on `fsdp`, or None."""
    sizes = {name: parameter.parameter.num_weights for name, parameter in plan.parameters.items()}
    whole = [name for name, parameter in plan.parameters.items() if parameter.parameter.names is None]
    share = sum(sizes[name] for name in whole) / max(sum(sizes.values()), 1)
    # Names of weights whose first dim the rules shard over the axis.
    names = [name for name, axes in rules if SHARD_AXIS in axes and not name.startswith("activation_")]
    if plan.mesh.size(SHARD_AXIS) == 1 or not names or share <= WHOLE_SHARE:
        return None
    largest = listed(sorted(whole, key=lambda name: -sizes[name]))
    dim = "embed" if "embed" in names else names[0]
    return (
        f"{share:.0%} of the parameters are whole on every rank along {SHARD_AXIS}={plan.mesh.size(SHARD_AXIS)}, "
        f"because no module declares their names: {largest}. To shard their first dim, before parallelize:\n"
        f"    names = {{name: ({dim!r}, *[None] * (p.dim() - 1)) for name, p in model.named_parameters() if p.dim()}}\n"
        "    model.declaration = maxmoe.parallel.Declaration("
        "logical_names=names | maxmoe.parallel.logical_names(model))"
    )


def undeclared_modules(plan: Plan) -> str | None:
    """Return the warning for modules without declaration that may mix the tokens of sharded sequences, or None."""
    axes, names = plan.tokens.length_axes, types_that_may_mix_tokens(plan)
    if not axes or not names:
        return None
    return (
        f"the rules shard sequences over {axes}, and {', '.join(names)} declare nothing: a module that mixes the "
        "tokens of a sequence sees only this rank's part, and computes something else. See needs_whole_sequences "
        "in maxmoe.parallel.Declaration and maxmoe.nn.TokenGroupAttribute; declare Declaration() for a module that "
        "mixes no tokens"
    )


def types_that_may_mix_tokens(plan: Plan) -> list[str]:
    """Return the names of the types of modules without declaration that may mix the tokens of a sequence."""
    return [*dict.fromkeys(type(each.module).__name__ for each in plan.values() if _may_mix_tokens(each.module))]


def _may_mix_tokens(module: nn.Module) -> bool:
    """Return whether a module without declaration may mix tokens.

    Layers of torch do not, except attention; modules of PEFT call what they wrap; quantized weights are not called.
    """
    package = type(module).__module__
    is_known = package.startswith(("torch.nn.", "peft.")) and not isinstance(module, nn.MultiheadAttention)
    return declaration_of(module) is NOTHING and not is_known and not isinstance(module, QuantizedWeight)
