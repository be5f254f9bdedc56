"""Selective activation checkpointing that saves the routing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from maxmoe._torch import tree_leaves
from maxmoe._torch.autograd import is_backward_running, is_packed_by_checkpoint, is_recomputed_with_gradients
from maxmoe._torch.this_thread import OfThisThread

# Operators whose outputs `keep_routing` saves.
KEPT_OPERATORS = ("maxmoe::route", "maxmoe::ragged_plan", "maxmoe_dispatch::all_gather_counts")


def is_recomputation() -> bool:
    """Return whether a forward that runs now is a recomputation, which is the case if a backward is running."""
    return is_backward_running()


def has_backward() -> bool:
    """Return whether a backward may follow the current forward.

    That is the case if gradients are enabled. The forward of a reentrant checkpoint runs without them and is recomputed
    with them. Compiled code does not recognize it.
    """
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and is_recomputed_with_gradients())


def is_checkpointed() -> bool:
    """Return whether the current forward will be recomputed by activation checkpointing, or is the recomputation.

    A non-reentrant checkpoint is recognized by the saved-tensor hook of its forward. The forward of a reentrant
    checkpoint is not recognized, because it runs without gradients.
    """
    return is_packed_by_checkpoint() or is_recomputation()


_keeps_choices: OfThisThread[bool] = OfThisThread("choice to keep routing")


@contextmanager
def choices_are_kept() -> Iterator[None]:
    """Context of a custom router: under `keep_routing`, its recomputation makes the same choices.

    All outputs of operators that are integers or booleans are saved, because a choice among experts is a comparison or
    an order of scores. Random numbers are drawn again, from the generator that the checkpoint has restored: if they
    were saved, later numbers would differ from the forward. Compiled code has no such context: its recomputation
    repeats the bits of its forward.
    """
    if torch.compiler.is_compiling():
        yield
        return
    with _keeps_choices.set(True):
        yield


def _policy(context: SelectiveCheckpointContext, operator: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    is_choice = any(
        isinstance(output, Tensor) and not output.is_floating_point() for output in tree_leaves(context.op_output)
    )
    is_random = torch.Tag.nondeterministic_seeded in operator.tags
    is_kept = (is_choice and not is_random and _keeps_choices.value) or operator.name() in KEPT_OPERATORS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_routing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Context function for `torch.utils.checkpoint` that saves the routing and recomputes everything else.

    Expert ids, weights and plan are saved, a few bytes per token. The recomputation then uses the same experts even if
    other operators are not bitwise reproducible, as some attention kernels on GPUs. Of a custom router, all
    integers and booleans that it computes are saved, which it must not change in place; compiled, it is recomputed::

        checkpoint(block, x, use_reentrant=False, context_fn=maxmoe.keep_routing)

    Returns:
        Contexts of the forward and of the recomputation.
    """
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts
