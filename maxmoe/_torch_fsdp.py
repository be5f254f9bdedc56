"""Private names of FSDP2, see `maxmoe/_torch.py`: which module is the root, and what an exception leaves in it."""

from typing import Any


def make_root(module: Any) -> None:
    """Make a module the root of FSDP2, unless a forward has done so.

    The root is the module of the first forward. If it is a module inside of the model, FSDP2 refuses a forward of the
    model later.
    """
    module._get_fsdp_state()._lazy_init()


def is_running_root(module: Any) -> bool:
    """Return whether a FSDP2 module has been called as the root of others; `reset_iter_state` raises for any other."""
    return bool(module._get_fsdp_state()._is_root)


def reset_root(root: Any) -> None:
    """Bring the root of FSDP2 modules, and those inside of it, into their state before a forward after an exception.

    The public `reset_iter_state` keeps gradients that FSDP2 has not reduced, so that a later backward would add them to
    its own. From torch 2.15 on it drops these, and the reduced gradients of earlier micro-batches as well.
    """
    states = root._get_fsdp_state()._state_ctx.all_states
    parameters = [each for state in states for group in state._fsdp_param_groups for each in group.fsdp_params]
    reduced = [parameter.sharded_param.grad for parameter in parameters]
    root.reset_iter_state()
    for parameter, gradient in zip(parameters, reduced, strict=True):
        parameter.sharded_param.grad = gradient
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        if "unsharded_accumulated_grad" in vars(parameter):  # until torch 2.14, an attribute
            parameter.unsharded_accumulated_grad = None
