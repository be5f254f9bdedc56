"""Warning for adapters that train nothing: the backward of a step reaches other adapters, but not them."""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maxmoe._torch import call_after_backward, is_backward_running
from maxmoe.ops import LowRankFactors

# The names of the wrappers that have run in a forward with gradients since the last check, without a gradient so far.
_waiting: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()
# The wrappers that a gradient has reached, or that a warning has named.
_known: "weakref.WeakSet[Any]" = weakref.WeakSet()


def watch(wrapper: Any, name: str, factors: Sequence[LowRankFactors]) -> None:
    """Warn at the end of the first backward that reaches other adapters, but not those of this wrapper.

    Args:
        wrapper: wrapper that hands over the factors, watched until the first gradient.
        name: name of the parameter, for the message.
        factors: factors in the graph of this forward.
    """
    if torch.compiler.is_compiling() or wrapper in _known:
        return
    trained = [factor for a, b, _ in factors for factor in (a, b) if factor.requires_grad]
    if not trained:
        return
    _waiting[wrapper] = name
    reference = weakref.ref(wrapper)

    def reached(_gradient: Tensor) -> None:
        wrapper = reference()
        if wrapper is None or wrapper in _known:
            return
        _known.add(wrapper)
        _waiting.pop(wrapper, None)
        # A recomputation of reentrant checkpointing runs a backward of its own, whose end is not that of the step.
        if not is_recomputed:
            call_after_backward(_warn)

    is_recomputed = is_backward_running()
    for factor in trained:
        factor.register_hook(reached)  # type: ignore[no-untyped-call]


def _warn() -> None:
    """Name the wrappers that no gradient has reached."""
    names = sorted(set(_waiting.values()))
    counts = {name: list(_waiting.values()).count(name) for name in names}
    _known.update(_waiting.keys())
    _waiting.clear()
    if names:
        listed = ", ".join(f"{name} ({counts[name]} modules)" for name in names)
        warnings.warn(
            f"no gradient has reached the adapters beside {listed}: they train nothing. Their outputs were not used in "
            "the loss, or were computed without gradients",
            stacklevel=2,
        )
