"""Declarations of the router and the experts of a sparse block of transformers, for `maxmoe.parallelize`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from maxmoe.config import MoEConfig
from maxmoe.declaration import Declaration, FusedGate, declaration_of
from maxmoe.nn import Experts
from maxmoe.presets.layouts import Entry


def declare_parts(block: nn.Module, router: nn.Module, config: MoEConfig, entries: Sequence[Entry]) -> None:
    """Declare router and experts of a block as `MoE` does, with the names and layouts of the block's parameters.

    The matrices are not computed in parts where gate and up are concatenated, because a shard would hold one of them
    alone, and where all experts share one matrix. They are not sharded by experts if a stack has unused matrices, if
    they are in two modules, and if each is a parameter of its own.
    """
    of_ours = Experts(config, device="meta").declaration
    of_modules: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        if entry.is_of_experts:
            module, _, name = entry.key.partition(".")
            of_modules.setdefault(module, {})[name] = entry
    for module, of_experts in of_modules.items():
        stacks = {name: entry for name, entry in of_experts.items() if entry.is_stack}
        is_sharded = len(of_modules) == 1 and not any(entry.has_unused_matrices for entry in stacks.values())
        names: dict[str, tuple[str | None, ...]] = {}
        input_dims: dict[str, str] = {}
        fused: dict[str, FusedGate] = {}
        for name, entry in stacks.items():
            ours = entry.names[0].removeprefix("experts.")
            expert, *dims = of_ours.logical_names[ours]
            dims = [*reversed(dims)] if entry.transposed else dims
            names[name] = (expert if is_sharded else None, *(dims[1:] if entry.is_flat else dims))
            if ours in of_ours.input_dims and not entry.is_flat:
                input_dims[name] = of_ours.input_dims[ours]
                if len(entry.names) > 1:
                    fused[name] = "interleaved" if entry.interleaved else "concatenated"
        is_whole = "concatenated" in fused.values() or any(entry.is_flat for entry in stacks.values())
        block.get_submodule(module).declaration = replace(  # type: ignore[assignment]
            of_ours,
            logical_names=names,
            input_dims=input_dims,
            fused_gates=fused,
            # Parameters are also in modules whose forward is not called.
            fsdp_unit=of_ours.fsdp_unit or any(each.is_flat or not each.is_stack for each in of_experts.values()),
            tensor_parallel_dims={} if is_whole or not names else of_ours.tensor_parallel_dims,
            added_to_output=tuple(name for name in ("down_proj_bias",) if name in names),
        )
    if (
        config.expert_norms is not None and config.expert_norms.output
    ):  # the experts gather it, so that its gradient is summed over the ranks of all experts
        experts: Any = block.get_submodule("experts")
        experts.post_expert_norm.declaration = Declaration(logical_names={"weight": ("norm",)})
    keys = {entry.names[0]: entry.key.partition(".")[2] for entry in entries}
    of_router: dict[str, tuple[str | None, ...]] = {}
    for path, part in config.router_rule.make(config, device="meta").named_modules(prefix="router"):
        declared = declaration_of(part).logical_names
        of_router |= {keys[f"{path}.{name}"]: dims for name, dims in declared.items() if f"{path}.{name}" in keys}
    router.declaration = Declaration(logical_names=of_router, fsdp_unit=True)  # type: ignore[assignment]
