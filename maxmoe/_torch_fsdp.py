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


def drop_unsharded_gradients(root: Any) -> None:
    """Drop the gradients that FSDP2 has not reduced yet, which `reset_iter_state` keeps."""
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
