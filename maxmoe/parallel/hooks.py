"""All hooks of a parallelized module, registered in one place."""

from torch import nn

from maxmoe.parallel.fsdp import fully_shard_blocks
from maxmoe.parallel.input_gradients import InputGradientCheck
from maxmoe.parallel.parameter_hooks import ParameterHooks
from maxmoe.parallel.plan import Plan
from maxmoe.parallel.tensor_parallel_hooks import ResidualReaderHook, TensorParallelHooks


def register_hooks(module: nn.Module, plan: Plan) -> None:
    """Register the hooks of all modules. PyTorch calls them in this order.

    Before the forward of a module:

    1. FSDP2 all-gathers the parameters of the block. Its hook is registered last, but prepended.
    2. `InputGradientCheck`, at the outermost module.
    3. `ParameterHooks` gathers the parameters of the FSDP unit over all other axes, from what FSDP2 has gathered.
    4. `TensorParallelHooks` marks the inputs, whose gradients are partial sums.
    5. `ResidualReaderHook` all-gathers a sharded residual stream.

    After the forward:

    1. `ParameterHooks` frees what it has gathered, and registers a hook on each output that gathers it again.
    2. `TensorParallelHooks` reduces the partial outputs.
    3. FSDP2 frees what it has gathered, and registers a hook on each output that gathers it again.

    In the backward, hooks on one tensor run in the order of their registration. On an output of the outermost module
    the parameters of its own FSDP unit are therefore gathered from the stored shards, before FSDP2 has gathered them.

    Args:
        module: with DTensor parameters.
        plan: plan of the module.
    """
    mesh = plan.mesh
    writers = {plan.modules[part.writer] for part in plan.residual_parts if part.writer is not None}
    InputGradientCheck(mesh).register(module)
    all_parameter_hooks = []
    for unit, names in plan.fsdp_units.items():
        parameter_hooks = ParameterHooks({path: plan.parameters[name] for path, name in names.items()})
        parameter_hooks.register(unit)
        all_parameter_hooks.append(parameter_hooks)
        if plan.tensor_parallel_axes[unit] and unit not in (*plan.reduced_by_layer, *writers):
            TensorParallelHooks(mesh, plan.tensor_parallel_axes[unit]).register(unit)
    for part in plan.residual_parts:
        if part.writer is not None and part.writer not in plan.dispatch_plans:
            writer = plan.modules[part.writer]
            TensorParallelHooks(mesh, plan.tensor_parallel_axes.get(writer, ()), part.axes).register(writer)
        if part.reader is not None:
            ResidualReaderHook(mesh, part.axes, part.partial_axes).register(plan.modules[part.reader])
    fully_shard_blocks(module, mesh, plan.fsdp_managed)
    stored = dict(module.named_parameters())  # FSDP2 has replaced the parameters by their shards
    for parameter_hooks in all_parameter_hooks:
        parameter_hooks.stored = stored
