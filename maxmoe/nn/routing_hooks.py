"""What `record_routing` and `replay_routing` do when a layer routes."""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from maxmoe._torch import never_compiled
from maxmoe.nn.routing import Routing
from maxmoe.recompute.selective import is_recomputation


class RoutingHook(Protocol):
    """Interface of what sees the calls of the router of a layer.

    Attributes:
        thread: thread whose calls it sees.
    """

    thread: int

    def experts(self, leading_dims: Sequence[int], device: torch.device) -> Tensor | None:
        """Return the expert ids ``(T, K)``, int64, for input ``(*leading_dims, D)``; None to let the router choose."""
        ...

    def observe(self, routing: Routing, leading_dims: Sequence[int]) -> None:
        """See the routing of a call whose input is ``(*leading_dims, D)``."""
        ...


class HookedModule(nn.Module):
    """Module with `routing_hooks`. Copies and pickles have none, because a context holds for the module that it got."""

    routing_hooks: tuple[RoutingHook, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "routing_hooks"}


@never_compiled
def given_experts(hooks: Sequence[RoutingHook], leading_dims: Sequence[int], device: torch.device) -> Tensor | None:
    """Return the expert ids of the last hook that gives any; None if the router chooses them."""
    given = [hook.experts(leading_dims, device) for hook in _of_this_call(hooks)]
    return next((experts for experts in reversed(given) if experts is not None), None)


@never_compiled
def observe(hooks: Sequence[RoutingHook], routing: Routing, leading_dims: Sequence[int]) -> None:
    """Show a routing to all hooks."""
    for hook in _of_this_call(hooks):
        hook.observe(routing, leading_dims)


def _of_this_call(hooks: Sequence[RoutingHook]) -> Sequence[RoutingHook]:
    """Return the hooks of this thread; in a recomputation all of them: autograd may run it in another thread."""
    if is_recomputation():
        return hooks
    thread = threading.get_ident()
    return [hook for hook in hooks if hook.thread == thread]


_hooks_change = threading.Lock()


def add_hook(layer: HookedModule, hook: RoutingHook) -> None:
    """Add a hook to a layer, which other threads may call meanwhile."""
    with _hooks_change:
        layer.routing_hooks += (hook,)


def remove_hook(layer: HookedModule, hook: RoutingHook) -> None:
    """Remove a hook from a layer, if it has it."""
    with _hooks_change:
        layer.routing_hooks = tuple(other for other in layer.routing_hooks if other is not hook)
