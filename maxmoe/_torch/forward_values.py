"""Values from outside of its arguments that a module reads in a forward, and that a recomputation of it needs again.

Whoever recomputes a module repeats its arguments alone. What a caller had set around the forward is not there then.
"""

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from maxmoe._torch.autograd import is_backward_running, running_checkpoints

Value = TypeVar("Value")

# Values by checkpoint, and in it by what has read them.
_kept: WeakKeyDictionary[object, dict[object, Any]] = WeakKeyDictionary()


def keep_for_recomputations(reader: object, value: Any, *, is_set_in: tuple[object, ...] = ()) -> None:
    """Keep a value for the recomputations of the running forward.

    `is_set_in` are checkpoints whose recomputation sets the value again. The value may refer to their graph, so that
    they would keep it, and it would keep them.
    """
    for checkpoint in running_checkpoints():
        if not any(checkpoint is each for each in is_set_in):
            _kept.setdefault(checkpoint, {})[reader] = value


def kept_values(reader: object) -> list[Any]:
    """Return the values that the forward has kept which a checkpoint recomputes now, of the innermost one first."""
    found = (_kept.get(checkpoint, {}) for checkpoint in running_checkpoints())
    return [values[reader] for values in found if reader in values]


def of_forward(reader: object, value: Value) -> Value:
    """Return a value that the running forward has, and in a recomputation the value that its forward had."""
    if torch.compiler.is_compiling():
        return value
    if is_backward_running():
        value = next(iter(kept_values(reader)), value)
    keep_for_recomputations(reader, value)
    return value
