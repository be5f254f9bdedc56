"""Applies a plan to a module: DTensors in the place of its parameters, runners of its layers, hooks, and FSDP2."""

from torch import nn

from maxmoe.parallel.apply.fsdp import fully_shard_blocks
from maxmoe.parallel.apply.input_gradients import InputGradientCheck
from maxmoe.parallel.apply.parameter_hooks import ParameterHooks
from maxmoe.parallel.apply.shard_parameters import distribute_parameters
from maxmoe.parallel.averages import allow_averages_of_buffers
from maxmoe.parallel.grad_scaler import refuse_wrong_scalers
from maxmoe.parallel.plan.plan import Plan
from maxmoe.ranks.token_group import uses_token_group


def apply_plan(module: nn.Module, plan: Plan, num_chunks: int, input_check: InputGradientCheck | None) -> None:
    """Shard the parameters of a module by its plan and register its hooks."""
    refuse_wrong_scalers()
    allow_averages_of_buffers()
    # Without the axes of FSDP2, which shards the parameters over them in `fully_shard_blocks`.
    distribute_parameters(module, {name: parameter.unsharded for name, parameter in plan.parameters.items()})
    for planned in plan.values():
        if uses_token_group(planned.module):
            planned.module.token_group = plan.tokens  # type: ignore[assignment]
    for layer, dispatch_plan in plan.layers.values():
        layer.runner = dispatch_plan.runner(num_chunks)
    parameter_hooks = _register_hooks(module, plan, input_check)
    fully_shard_blocks(module, plan)
    for hooks in parameter_hooks:
        hooks.keep_stored()


def _register_hooks(module: nn.Module, plan: Plan, input_check: InputGradientCheck | None) -> list[ParameterHooks]:
    """Register the hooks of all modules, and return the hooks of the FSDP units. PyTorch calls them in this order.

    Before the forward of a module:

    1. FSDP2 all-gathers the parameters of the block, after a check that they have no hooks. These two are registered
       last, but prepended.
    2. `InputGradientCheck`, at the outermost module.
    3. `ParameterHooks` gathers the parameters of the FSDP unit over all other axes, from what FSDP2 has gathered. In a
       block, it also takes the parameters inside of it that nothing gathers, to reduce their gradients together.
    4. `TensorParallelHooks` wraps the inputs, so that the backward reduces their gradients, which are partial sums.
    5. `ResidualReaderHook` all-gathers a sharded residual stream.

    After the forward:

    1. `ParameterHooks` frees its gathered parameters; a hook on each output gathers them again in the backward.
    2. `TensorParallelHooks` reduces the partial outputs.
    3. FSDP2 frees its gathered parameters; a hook on each output gathers them again in the backward.

    In the backward, hooks on one tensor run in the order of their registration. If an output of a FSDP unit is also an
    output of the FSDP2 module, the hook of `ParameterHooks` runs first, so it calls `unshard` of the FSDP2 module.

    `input_check` is None for a pipeline stage, whose inputs `Pipeline.step` checks.
    """
    if input_check is not None:
        module.register_forward_pre_hook(input_check.enter, with_kwargs=True)
    all_parameter_hooks = []
    for module_plan in plan.values():
        child = module_plan.module
        if module_plan.parameters or module_plan.reduced:
            parameter_hooks = ParameterHooks(module_plan, plan.fsdp_blocks)
            all_parameter_hooks.append(parameter_hooks)
            for axes in module_plan.reduction_axes:
                plan.mesh.process_group(*axes)  # one over several axes is made here, not in a backward
            child.register_forward_pre_hook(parameter_hooks.gather)
            # always_call, so that the DTensors are put back even if the forward raises.
            child.register_forward_hook(parameter_hooks.free, always_call=True)
        if module_plan.tensor_parallel_hooks is not None:
            child.register_forward_pre_hook(module_plan.tensor_parallel_hooks.enter, with_kwargs=True)
            child.register_forward_hook(module_plan.tensor_parallel_hooks.leave)
        if module_plan.residual_reader is not None:
            child.register_forward_pre_hook(module_plan.residual_reader.enter)
    return all_parameter_hooks
