"""Selective activation checkpointing that saves the routing."""

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from maxmoe._torch import is_backward_running, is_packed_by_checkpoint, selective_checkpoint_storage

# Operators whose outputs `keep_routing` saves.
KEPT_OPERATORS = ("maxmoe::route", "maxmoe::ragged_plan", "maxmoe_dispatch::all_gather_counts")


def is_recomputation() -> bool:
    """Return whether a forward that runs now is a recomputation, which is the case if a backward is running."""
    return is_backward_running()


def is_checkpointed() -> bool:
    """Return whether the current forward will be recomputed by activation checkpointing, or is the recomputation.

    A non-reentrant checkpoint is recognized by the saved-tensor hook of its forward. The forward of a reentrant
    checkpoint is not recognized, because it runs without gradients.
    """
    return is_packed_by_checkpoint() or is_recomputation()


def checkpointed_call() -> int | None:
    """Return an id that a forward under `keep_routing` shares with its recomputation only; None outside of it."""
    storage = selective_checkpoint_storage()
    return None if storage is None else id(storage)


def _policy(_context: object, operator: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def keep_routing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Context function for `torch.utils.checkpoint` that saves the routing and recomputes everything else.

    Expert ids, weights and plan are saved, a few bytes per token. The recomputation then uses the same experts even if
    other operators are not bitwise reproducible, as some attention kernels on GPUs::

        checkpoint(block, x, use_reentrant=False, context_fn=maxmoe.keep_routing)

    Returns:
        Contexts of the forward and of the recomputation.
    """
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts
