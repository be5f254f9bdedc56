"""FSDP2 for the `fsdp` axis: prefetches the parameters of the next block and frees the previous block's."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn
from torch.distributed import fsdp

from maxmoe._torch import never_compiled
from maxmoe._torch.fsdp import is_running_root, parameters_with_hooks, reset_root, shard_axes, sharded_dim
from maxmoe.parallel.plan.fsdp_units import CONTAINERS, SHARD_AXIS, blocks
from maxmoe.parallel.plan.plan import Plan


def fully_shard_blocks(module: nn.Module, plan: Plan) -> None:
    """Apply `torch.distributed.fsdp.fully_shard` to the blocks of a model and then to the rest of it.

    Parameters that FSDP cannot shard are ignored by it. Those of a block whose gradients are all-reduced over the same
    axes share their collectives. Gradients are summed over the ranks, not averaged.
    """
    parameters = dict(module.named_parameters())
    managed = {parameters[name]: planned for name, planned in plan.parameters.items() if planned.fsdp_axes}
    ignored = {parameter for parameter in parameters.values() if parameter not in managed}

    @cache  # because FSDP2 compares the result by identity
    def axes_of_group(*replicate: str) -> Any:
        group = plan.mesh.process_group(*replicate) if replicate else None
        return shard_axes(plan.mesh.device_mesh, SHARD_AXIS, replicate, group)

    def placement(parameter: nn.Parameter) -> Any:
        planned = managed[parameter]
        dim = next(dim for dim, axes in enumerate(planned.stored.spec) if SHARD_AXIS in axes)
        return sharded_dim(dim, axes_of_group(*planned.fsdp_axes[:-1]))

    @never_compiled
    def refuse_hooks(block: nn.Module, _arguments: object) -> None:
        """Forward pre-hook: raise for hooks that FSDP2 would not call, because it sets the gradients of its shards."""
        for owner, name in parameters_with_hooks(block):
            path = next(path for path, child in module.named_modules() if child is owner)
            raise RuntimeError(
                f"{path}.{name}".lstrip(".") + f" must have no hook, because the axis {SHARD_AXIS!r} shards it and no "
                "autograd operator computes its gradient: use register_post_accumulate_grad_hook, or change the "
                "gradient after the backward"
            )

    for block in plan.fsdp_blocks.values():
        fsdp_module = fsdp.fully_shard(
            block,
            mesh=plan.mesh.device_mesh,
            # Also for the root module. Otherwise its parameters would stay gathered after an evaluation, as plain
            # tensors, and an optimizer made then would hold these instead of the shards.
            reshard_after_forward=True,
            dp_mesh_dims=fsdp.DataParallelMeshDims(shard=SHARD_AXIS),
            shard_placement_fn=placement,
            ignored_params=ignored,
        )
        # FSDP averages by default, but the loss is already divided by the global number of tokens. A factor other than
        # the group size needs SUM, because gloo has no PREMUL_SUM.
        fsdp_module.set_gradient_divide_factor(1.0)
        fsdp_module.set_force_sum_reduction_for_comms(True)
        block.register_forward_pre_hook(refuse_hooks, prepend=True)


def fully_shard_stage(stage: nn.Module, model: nn.Module, plan: Plan, *, reshards: bool) -> None:
    """Make a module around a model the root of FSDP2, so that a schedule finds the FSDP2 modules of its stage.

    `reshards`: whether parameters are freed after each forward. A schedule with a split backward looks for the gathered
    parameters between forward and backward, so that they must stay.
    """
    if any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
        root = fsdp.fully_shard(
            stage,
            mesh=plan.mesh.device_mesh,
            dp_mesh_dims=fsdp.DataParallelMeshDims(shard=SHARD_AXIS),
            ignored_params=set(model.parameters()),
        )
        root.set_reshard_after_forward(reshards)


def reset_fsdp(module: nn.Module) -> None:
    """Shard the parameters of FSDP2 again after an exception, and drop gradients that it has not reduced.

    A later backward would add these gradients to its own.
    """
    for child in fsdp_modules(module):
        if is_running_root(child):  # a block outside of which nothing is sharded is a root of its own
            reset_root(child)


def fsdp_modules(module: nn.Module) -> Iterator[fsdp.FSDPModule]:
    """Yield the FSDP2 modules among a module and its children."""
    return (child for child in module.modules() if isinstance(child, fsdp.FSDPModule))


def around_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with all blocks of a model, the outermost first: wrappers around a model, and the model."""
    found = set(blocks(module))
    while True:
        if module not in found and not isinstance(module, CONTAINERS):
            yield module
        inner = [child for child in module.children() if found and found <= set(child.modules())]
        if not inner:
            return
        (module,) = inner[:1]
