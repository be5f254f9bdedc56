"""Private names of FSDP2, see `maxmoe/_torch.py`: what an exception leaves in it."""

from typing import Any


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
