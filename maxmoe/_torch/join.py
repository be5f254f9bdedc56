"""Private names of torch's `Join`, the context that DDP's `join` returns: torch does not tell whether one runs."""

import functools
from typing import Any

from torch.distributed.algorithms.join import Join

_running: list[Join] = []  # contexts of this process


def is_within_join() -> bool:
    """Return whether this process runs a context in which a rank may end its loop before the others."""
    return any(join._enable and not join._throw_on_early_termination for join in _running)


@functools.cache
def watch_joins() -> None:
    """Note from now on which contexts run, once per process."""
    enter: Any = Join.__enter__
    leave: Any = Join.__exit__

    @functools.wraps(enter)
    def entered(join: Join) -> Any:
        _running.append(join)
        return enter(join)

    @functools.wraps(leave)
    def left(join: Join, *error: Any) -> Any:
        if join in _running:  # not one that was entered before
            _running.remove(join)
        return leave(join, *error)

    Join.__enter__, Join.__exit__ = entered, left  # type: ignore[method-assign]
