"""Running a module on a mesh: every rank its own tokens, which travel to experts; other parameters are gathered."""

import warnings
from collections.abc import Collection

from torch import nn

from maxmoe.declaration import NOTHING, declaration_of
from maxmoe.nn import (
    Experts,
    MoE,
    Router,
    SharedExperts,
    check_recompute,
    recompute_of,
    set_recompute,
)
from maxmoe.parallel.dispatch_plan import Dispatch
from maxmoe.parallel.hooks import register_hooks
from maxmoe.parallel.plan import Plan
from maxmoe.parallel.shard_parameters import distribute_parameters
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
    recompute: Collection[str] | None = None,
    strict: bool = False,
    allow_unused: bool = False,
) -> nn.Module:
    """Shard the parameters of a module, and let it run on every rank's own tokens.

    Afterwards the module takes and returns plain tensors: the sequences that the axes of `activation_batch` give this
    rank, or the parts of them that those of `activation_length` give it; see `token_sharding`. Ranks that differ on
    other axes hold the same tokens. Parameters and their gradients are DTensors: make the optimizer afterwards. Each
    rank calls backward on its part of the loss plus the auxiliary loss, which is global: the gradients are those of the
    sum of the parts, and of the auxiliary loss once.

    Experts stay on the axes that the rules `exp` and `activation_exp` share, and tokens travel over those of them that
    shard the tokens, as `dispatch` says. All other parameters are gathered before the forward of their FSDP unit,
    freed after it, gathered again in the backward, and their gradients are reduce-scattered. Where it can, FSDP2 does
    that for the `fsdp` axis, block by block; see `fsdp_managed`. Modules with tensor-parallel dims compute with their
    own part of the weights and all-reduce their output. Where the rules shard `activation_embed`, so is a
    `ResidualStream`. What modules declare for all this is in `Declaration`.

    Use ``maxmoe.mean_over_tokens(losses, tokens=token_group(mesh, rules))`` for the loss: a mean over the tokens of
    this rank alone, as under DDP and FSDP, gives gradients too large by the number of ranks that hold other tokens.

    A floating-point input of the module must require a gradient on all ranks or on none: otherwise the forward raises a
    ValueError on every rank.

    Compute losses from what modules return. Do not backpropagate from tensors captured by forward hooks: the gathered
    weights are freed.

    Args:
        module: with logical names, see `Declaration`.
        mesh: of the ranks.
        rules: the table, or the name of a preset.
        dispatch: how tokens reach experts on other ranks. "ring_of_experts": every rank gets all tokens and computes
            those of its experts. "ragged_all_to_all": every rank gets the rows of its experts. "auto": the one of the
            two that moves fewer bytes. "gather_weights": tokens stay, every rank gathers all experts.
        num_chunks: parts of the tokens of a MoE layer, of which one is communicated while another is computed; where
            nothing travels there is one. With `buffer_factor` each part has its bound.
        recompute: names of the parts that are computed again in the backward, see `maxmoe.set_recompute`; None for
            those that the module recomputes already.
        strict: see `parameter_shardings`.
        allow_unused: accept mesh axes that no rule has, and rules with names or axes that nothing else has; they have
            no effect, and most are typos.

    Returns:
        The module.

    Raises:
        TypeError: for a mesh that is none of `maxmoe.sharding`.
        ValueError: as `shard_parameters` and `set_recompute`; for another dispatch or num_chunks; for a MoE layer with
            adapters around its parts; if the axes of the experts do not divide them; if the rules shard sequences that
            a layer needs whole; on every rank, if meshes, modules, their parameters, rules, dispatch, num_chunks or
            recompute differ between ranks.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a maxmoe.sharding.Mesh, got {type(mesh).__name__}")
    rules = LogicalRules.load(rules)
    _check_adapters(module)
    recompute = recompute_of(module) if recompute is None else recompute
    facts = {
        "the mesh": repr(mesh),
        "dispatch": repr(dispatch),
        "num_chunks": repr(num_chunks),
        "recompute": repr(sorted(map(str, recompute))),
        "strict and allow_unused": repr((strict, allow_unused)),
        **_facts(module, rules),
    }
    check_ranks_agree(facts, mesh.device_mesh.device_type)
    check_recompute(module, recompute)
    plan = Plan(module, mesh, rules, strict=strict, allow_unused=allow_unused, dispatch=dispatch)
    check_plan(plan, num_chunks)
    set_recompute(module, recompute)
    distribute_parameters(module, {name: parameter.unsharded for name, parameter in plan.parameters.items()})
    for child in plan.modules.values():
        if declaration_of(child).uses_token_group:
            child.token_group = plan.tokens
    for path, dispatch_plan in plan.dispatch_plans.items():
        plan.layer(path).set_runner(dispatch_plan.runner(num_chunks))
    register_hooks(module, plan)
    return module


def _facts(module: nn.Module, rules: LogicalRules) -> dict[str, str]:
    """What the collectives of a parallelized module depend on."""
    facts = {"the rules": repr(rules)}
    for path, child in module.named_modules():
        facts[f"the module {path or '(root)'}"] = f"{type(child).__name__}({child.extra_repr()})"
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        facts[path] = f"shape {tuple(tensor.shape)}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
    return facts


def _check_adapters(module: nn.Module) -> None:
    """Refuse layers whose parts compute with other parameters than they declare: those of LoRA lie beside them."""
    for path, layer in module.named_modules():
        for name, part in layer.named_children() if isinstance(layer, MoE) else ():
            if not isinstance(part, Router | Experts | SharedExperts):
                raise ValueError(
                    f"{path}.{name}".lstrip(".") + f" must have no adapters around it, got {type(part).__name__}: "
                    "merge them before parallelize (PEFT: merge_and_unload)"
                )


def check_plan(plan: Plan, num_chunks: int) -> None:
    """Check that the modules can compute with the tokens that the plan gives to a rank.

    Args:
        plan: of the model.
        num_chunks: number of parts of the tokens of a MoE layer.

    Raises:
        ValueError: for less than one chunk, and for layers that need whole sequences.
    """
    _check_whole_sequences(plan)
    if not isinstance(num_chunks, int) or num_chunks < 1:
        raise ValueError(f"num_chunks must be a positive int, got {num_chunks!r}")
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
                f"{path or type(child).__name__} needs whole sequences, sharded here over {plan.tokens.length_axes}: "
                "choose rules that do not shard activation_length over them, such as 'ep-as-dp'"
            )
    silent = {type(child).__name__: None for child in plan.modules.values() if _may_mix_tokens(child)}
    if plan.tokens.length_axes and silent:
        warnings.warn(
            f"the rules shard sequences over {plan.tokens.length_axes}, and {', '.join(silent)} declare nothing: a "
            "module that mixes the tokens of a sequence sees only this rank's part, and computes something else. See "
            "needs_whole_sequences and uses_token_group in maxmoe.parallel.Declaration; an empty declaration says that "
            "a module mixes none",
            stacklevel=4,
        )


def _may_mix_tokens(module: nn.Module) -> bool:
    """Whether nothing is known of a module: layers of torch without a declaration compute each token by itself."""
    is_of_torch = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.MultiheadAttention)
    return declaration_of(module) is NOTHING and not is_of_torch
