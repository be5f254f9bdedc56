"""Activation checkpointing that never routes twice."""

from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def _policy(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    kept = {torch.ops.maxmoe.route.default, torch.ops.maxmoe.ragged_plan.default}
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


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
