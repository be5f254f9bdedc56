"""Recomputation by name: `set_recompute` selects the parts of a model that are recomputed in the backward."""

from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from maxmoe._torch import SELECTIVE_CHECKPOINT_OPTIONS
from maxmoe._torch.compile import call_with_hooks, runs_uncompiled
from maxmoe.checks.fields import nearest


class Checkpointed(nn.Module):
    """Base class of modules that are recomputed in the backward if `set_recompute` names them.

    A recomputed module saves its arguments only. Its hooks run again in the recomputation. On a mesh, it is a FSDP
    unit, see `Declaration`::

        class LatentAttention(maxmoe.nn.Checkpointed):
            recompute_names = ("attention",)

    Attributes:
        recompute_names: names for `set_recompute`; any of them selects the module.
        recompute: all names that `set_recompute` has set for the model.
        context_fn: argument of `torch.utils.checkpoint`, or None; `keep_routing` for a module that routes.
    """

    recompute_names: ClassVar[tuple[str, ...]]
    recompute: frozenset[str] = frozenset()
    context_fn: ClassVar[Callable[[], tuple[Any, Any]] | None] = None

    @property
    def is_recomputed(self) -> bool:
        """Whether the module is recomputed in the backward."""
        return not self.recompute.isdisjoint(self.recompute_names)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the module, under `torch.utils.checkpoint` if it is recomputed."""
        if runs_uncompiled.value:
            return call_with_hooks(self, *arguments, **options)
        if not (self.is_recomputed and torch.is_grad_enabled()):
            return super().__call__(*arguments, **options)
        context_fn = type(self).context_fn
        if context_fn is not None:
            options |= {"context_fn": context_fn, **SELECTIVE_CHECKPOINT_OPTIONS}
        return checkpoint(super().__call__, *arguments, use_reentrant=False, **options)


def set_recompute(model: nn.Module, names: Collection[str]) -> None:
    """Select the parts of a model that are recomputed in the backward instead of saving their intermediate tensors.

    The gradients are bitwise the same. No token is routed or counted twice::

        maxmoe.set_recompute(model, ("experts", "dispatch"))

    Names in `maxmoe.MoE` layers:

    - "experts": the routed experts save their input and the plan, and recompute the products with gate and up. They do
      not recompute the product with down, the weighted sum or the combination.
    - "dispatch": if the input of the experts was communicated, gathered or scaled, it is freed after the forward. It is
      recomputed in the backward while the gradients of the outputs are communicated. Forward hooks must not keep it.
    - "shared_experts": like "experts", for the shared experts.

    Names in `maxmoe.models.Decoder`, whose parts then save their arguments only: "attention", "feed_forward" (the dense
    layers), "norms", and "blocks", which includes all others. For other modules, see `maxmoe.nn.Checkpointed`.

    Args:
        model: model to configure.
        names: names of all parts to recompute; empty for none.

    Raises:
        TypeError: if `names` is a str.
        ValueError: for a name that no module of the model has, and for a part inside of another recomputed part. The
            model is not changed then.

    Source: `jax.checkpoint_policies.save_only_these_names`; Megatron-LM `--recompute-modules`.
    """
    check_recompute(model, names)
    for _, module in _parts(model):
        module.recompute = frozenset(names)


def recompute_of(model: nn.Module) -> frozenset[str]:
    """Return the names that `set_recompute` has set for a model."""
    return frozenset().union(*(module.recompute & {*module.recompute_names} for _, module in _parts(model)))


def check_recompute(model: nn.Module, names: Collection[str]) -> None:
    """Raise as `set_recompute` for wrong names, without changing the model."""
    if isinstance(names, str):
        raise TypeError(f"recompute must be a tuple of names, got the str {names!r}")
    known = {name for _, module in _parts(model) for name in module.recompute_names}
    for name in names:
        if name not in known:
            raise ValueError(f"recompute must name parts of this model, got {name!r}{nearest(str(name), known)}")
    for path, module in _parts(model):
        own = module.recompute_names if isinstance(module, Checkpointed) else ()
        for outer in (name for name in own if name in names):
            for inner_path, part in _parts(module):
                if inner := sorted({*names} & {*part.recompute_names} - {outer}):
                    inside = f"{path}.{inner_path}".strip(".")
                    raise ValueError(
                        f"recompute has {outer!r}, which recomputes {inside} already, and {inner[0]!r}: choose one of "
                        "the two"
                    )


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules that have names for `set_recompute`, with their paths."""
    return ((path, module) for path, module in model.named_modules() if hasattr(module, "recompute_names"))
