"""Check of optimizers that were made before the parameters that they hold were replaced."""

import functools

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

# Name of the attribute with the path of a parameter, set on parameters that have been replaced.
_REPLACED = "replaced_by_shard_of"


def mark_replaced(parameter: Tensor, name: str, *, after: str = "parallelize") -> None:
    """Mark a parameter that another one has replaced: `step` of an optimizer that holds it raises.

    Such a parameter never gets a gradient. The optimizer would skip it silently.
    """
    setattr(parameter, _REPLACED, (name, after))
    _check_every_optimizer()


@functools.cache
def _check_every_optimizer() -> None:
    """Register the check of optimizers, once per process."""
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (replaced := getattr(parameter, _REPLACED, None)) is not None:
                name, after = replaced
                raise RuntimeError(
                    f"{type(optimizer).__name__} must be made after {after}: it holds the replaced {name}, which is no "
                    "longer trained"
                )
