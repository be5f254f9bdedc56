"""Activation checkpointing that never routes twice."""

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from maxmoe._torch import is_backward_running, is_packed_by_checkpoint, selective_checkpoint_storage

# Operators whose results `keep_routing` keeps.
KEPT_OPERATORS = ("maxmoe::route", "maxmoe::ragged_plan", "maxmoe_dispatch::all_gather_counts")


def is_recomputation() -> bool:
    """Return whether a forward that runs now is a recomputation: a backward is running."""
    return is_backward_running()


def is_checkpointed() -> bool:
    """Return whether this forward is one that activation checkpointing runs again later, or the recomputation itself.

    A non-reentrant checkpoint packs every tensor that autograd saves in its forward. The forward of a reentrant one is
    not recognized: it runs without gradients.
    """
    return is_packed_by_checkpoint() or is_recomputation()


def checkpointed_call() -> int | None:
    """Return a number that a forward checkpointed with `keep_routing` and its recomputation share; None otherwise."""
    storage = selective_checkpoint_storage()
    return None if storage is None else id(storage)


def _policy(_context: object, operator: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


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
