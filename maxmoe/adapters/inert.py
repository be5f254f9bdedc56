"""Warning for adapters that train nothing: their factors have no gradient at the first step of their optimizer."""

import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from maxmoe.whole_tensors import is_dtensor

Parameters = Callable[[Any], Sequence[Tensor]]

# Wrappers whose factors no optimizer has updated so far: the name of their parameter, and a function that returns their
# factors. They are looked up late, because `parallelize` replaces them.
_waiting: "weakref.WeakKeyDictionary[Any, tuple[str, Parameters]]" = weakref.WeakKeyDictionary()
_known: "weakref.WeakSet[Any]" = weakref.WeakSet()
_changes = threading.Lock()  # by forwards and optimizers of several threads


def watch(wrapper: Any, name: str, parameters: Parameters) -> None:
    """Warn at the first step of the optimizer of a wrapper's factors if no gradient has reached them.

    Args:
        wrapper: wrapper that hands over its factors.
        name: name of the adapted parameter, for the message.
        parameters: function of the wrapper that returns the factors that are trained.
    """
    if torch.compiler.is_compiling() or wrapper in _known or wrapper in _waiting or not torch.is_grad_enabled():
        return
    with _changes:
        _waiting[wrapper] = name, parameters
    _check_first_steps()


@functools.cache
def _check_first_steps() -> None:
    """Register the check of optimizers, once per process."""
    register_optimizer_step_pre_hook(_name_those_without_gradient)


def _name_those_without_gradient(optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    has_closure = any(argument is not None for argument in (*arguments[1:], *options.values()))
    if not _waiting or has_closure:  # which computes the gradients later
        return
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    inert: Counter[str] = Counter()
    with _changes:
        for wrapper, (name, parameters) in list(_waiting.items()):
            factors = parameters(wrapper)
            if not any(id(factor) in updated for factor in factors):
                continue
            del _waiting[wrapper]
            _known.add(wrapper)
            inert[name] += not any(map(_has_gradient, factors))
    listed = ", ".join(f"{name} ({count} modules)" for name, count in sorted(inert.items()) if count)
    if listed:
        warnings.warn(
            f"{type(optimizer).__name__} updates the adapters beside {listed}, but no gradient has reached them: they "
            "train nothing. Their outputs are not used in the loss, or are computed without gradients",
            stacklevel=3,
        )


def _has_gradient(factor: Tensor) -> bool:
    """Return whether a factor has a gradient that is not zero; the shard of a rank without tokens may be zero."""
    return factor.grad is not None and (is_dtensor(factor) or bool(factor.grad.any()))
