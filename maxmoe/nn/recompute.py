"""Activation checkpointing that never routes twice."""

from contextlib import AbstractContextManager

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)


def is_recomputation() -> bool:
    """Return whether a forward that runs now is a recomputation: a backward is running."""
    return torch._C._current_graph_task_id() != -1


def is_checkpointed() -> bool:
    """Return whether this forward is one that activation checkpointing runs again later, or the recomputation itself.

    A non-reentrant checkpoint packs every tensor that autograd saves in its forward. The forward of a reentrant one is
    not recognized: it runs without gradients.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    is_packed = hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__
    return is_packed or is_recomputation()


def checkpointed_call() -> int | None:
    """Return a number that a forward checkpointed with `keep_routing` and its recomputation share; None otherwise."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode):
            return id(mode.storage)  # the forward writes the kept tensors there, the recomputation reads them
    return None


# Operators whose results `keep_routing` keeps; dispatch across ranks adds its own.
KEPT_OPERATORS: set[object] = {torch.ops.maxmoe.route.default, torch.ops.maxmoe.ragged_plan.default}


def _policy(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def keep_routing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Context for `torch.utils.checkpoint`: recompute everything but the routing.

    The few bytes of experts, weights and plan per token are kept, so that the recomputation takes the same experts
    even where the rest is not repeatable to the last bit (some attention kernels on GPUs)::

        checkpoint(block, x, use_reentrant=False, context_fn=maxmoe.keep_routing)

    Returns:
        The pair of contexts that `context_fn` must give.
    """
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts
