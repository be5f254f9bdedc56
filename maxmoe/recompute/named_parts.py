"""Recomputation by name: which parts of a model run again in the backward instead of keeping what it needs."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from maxmoe.config import nearest
from maxmoe.declaration import SavedTensor


class Checkpointed(nn.Module):
    """A module that runs again in the backward, which keeps its arguments only, where `set_recompute` names it.

    The hooks of the module run again too. On a mesh it is a FSDP unit, see `Declaration`::

        class LatentAttention(maxmoe.nn.Checkpointed):
            recompute_names = ("attention",)

    Attributes:
        recompute_names: by one of which `set_recompute` knows it.
        recompute: all names that are in use in the model.
        context_fn: of `torch.utils.checkpoint`, None for none; `keep_routing` for a module that routes.
    """

    recompute_names: ClassVar[tuple[str, ...]]
    recompute: frozenset[str] = frozenset()
    context_fn: ClassVar[Callable[[], tuple[Any, Any]] | None] = None

    @property
    def is_recomputed(self) -> bool:
        """Whether the module runs again."""
        return not self.recompute.isdisjoint(self.recompute_names)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the module, and remember how to run it again.

        Args:
            *arguments: of its forward.
            **options: of its forward.

        Returns:
            What its forward returns.
        """
        if not (self.is_recomputed and torch.is_grad_enabled()):
            return super().__call__(*arguments, **options)
        context_fn = type(self).context_fn
        if context_fn is not None:
            options["context_fn"] = context_fn
        return checkpoint(super().__call__, *arguments, use_reentrant=False, **options)

    def mark_saved(self, saved: Mapping[str, SavedTensor], *arguments: str) -> dict[str, SavedTensor]:
        """Mark the tensors that are recomputed.

        Args:
            saved: what the module saves, by name.
            *arguments: the names of those that are its arguments.

        Returns:
            The same tensors.
        """
        return {
            name: tensor._replace(is_kept=name in arguments or not self.is_recomputed) for name, tensor in saved.items()
        }


def set_recompute(model: nn.Module, names: Collection[str]) -> None:
    """Choose the parts of a model that are computed again in the backward, instead of what it needs being kept.

    The gradients are the same to the bit. Nothing is routed or counted twice::

        maxmoe.set_recompute(model, ("experts", "dispatch"))

    Of `maxmoe.MoE` layers:

    - "experts": the routed experts keep their input and the plan, neither gate nor up; these are computed again inside
      the operator, but not down, nor the weighted sum, nor the way back of the outputs.
    - "dispatch": the input of the experts is freed where it was exchanged, gathered or scaled, and so again in the
      backward, while the gradients of the outputs travel. Forward hooks must not keep it.
    - "shared_experts": as "experts".

    Of `maxmoe.models.Decoder`, whose parts then keep their arguments only: "attention", "feed_forward" (the dense
    layers), "norms", and "blocks", which includes all others. Modules of one's own: see `maxmoe.nn.Checkpointed`.

    Args:
        model: of any modules.
        names: all that are to be recomputed; none for nothing.

    Raises:
        TypeError: for names that are one str.
        ValueError: for a name of nothing in this model, and for parts that are inside of others; then nothing changes.

    Source: `jax.checkpoint_policies.save_only_these_names`; Megatron-LM `--recompute-modules`.
    """
    check_recompute(model, names)
    for _, module in _parts(model):
        module.recompute = frozenset(names)


def recompute_of(model: nn.Module) -> frozenset[str]:
    """Return the names that `set_recompute` has set.

    Args:
        model: of any modules.

    Returns:
        Those of all parts.
    """
    return frozenset().union(*(module.recompute & {*module.recompute_names} for _, module in _parts(model)))


def check_recompute(model: nn.Module, names: Collection[str]) -> None:
    """Check names for `set_recompute`.

    Args:
        model: of any modules.
        names: all that are to be recomputed.

    Raises:
        TypeError: for names that are one str.
        ValueError: for a name of nothing in this model, and for parts that are inside of others.
    """
    if isinstance(names, str):
        raise TypeError(f"recompute must be a tuple of names, got the str {names!r}")
    known = {name for _, module in _parts(model) for name in module.recompute_names}
    for name in names:
        if name not in known:
            raise ValueError(f"recompute must name parts of this model, got {name!r}{nearest(str(name), known)}")
    for path, module in _parts(model):
        for outer in {*names} & {*module.recompute_names} if isinstance(module, Checkpointed) else ():
            for inner_path, part in _parts(module):
                if inner := sorted({*names} & {*part.recompute_names} - {outer}):
                    inside = f"{path}.{inner_path}".strip(".")
                    raise ValueError(
                        f"recompute has {outer!r}, which recomputes {inside} already, and {inner[0]!r}: choose one of "
                        "the two"
                    )


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that have names for `set_recompute`."""
    return ((path, module) for path, module in model.named_modules() if hasattr(module, "recompute_names"))
