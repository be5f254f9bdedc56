"""Hooks on the routers of MoE layers, for the time of a block, while other threads call the layers."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from maxmoe._torch import never_compiled
from maxmoe.nn.moe import MoE


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does nothing in the calls of other threads.

    While it is added or removed, torch may call it there as one without options.
    """
    thread = threading.get_ident()

    @never_compiled
    def called(*arguments: Any) -> Any:
        return hook(*arguments) if threading.get_ident() == thread else None

    return called


_hooks_change = threading.Lock()


def known_to(layer: MoE, handle: Any) -> Callable[[], None]:
    """Tell a layer that it has a hook, for compiled code; return the function that removes the hook."""

    def tell(hooks: Callable[[frozenset[int]], frozenset[int]]) -> None:
        with _hooks_change:  # of other threads
            layer.replay_hooks = hooks(layer.replay_hooks)
            layer.has_replay_hooks = bool(layer.replay_hooks)

    def remove() -> None:
        handle.remove()
        tell(lambda hooks: hooks - {handle.id})

    tell(lambda hooks: hooks | {handle.id})
    return remove


@contextmanager
def hooked(register: Callable[[str, MoE], list[Any]], layers: Mapping[str, MoE]) -> Iterator[None]:
    """Context with hooks on layers.

    Args:
        register: function of path and layer that registers the hooks of a layer and returns their handles.
        layers: layers by path.
    """
    with ExitStack() as stack:
        for path, layer in layers.items():
            for handle in register(path, layer):
                stack.callback(known_to(layer, handle))
        yield
