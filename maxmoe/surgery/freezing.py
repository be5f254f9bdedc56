"""Freezing of single experts of a stack that is trained."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from maxmoe.nn import MoE
from maxmoe.nn.checks import FROZEN
from maxmoe.surgery.selection import (
    ExpertIds,
    Layers,
    check_layer,
    check_not_frozen,
    check_optimizer,
    expert_ids,
    layers_of,
)


class _Freezing:
    """What parameters and layers with frozen experts have in common. Copies of them have another one."""


# The optimizer around whose steps frozen experts are put back. Weak, so that parameters do not keep it alive.
_optimizers: "weakref.WeakKeyDictionary[_Freezing, weakref.ref[Optimizer]]" = weakref.WeakKeyDictionary()


class FrozenExperts:
    """Frozen experts of a model, the result of `freeze_experts`.

    Args:
        experts: parameters with the experts in their first dim, and the ids ``(N,)`` of those that are frozen.
        layers: layers with these parameters.
        optimizer: optimizer of the parameters.
    """

    def __init__(self, experts: Mapping[nn.Parameter, Tensor], layers: Sequence[MoE], optimizer: Optimizer) -> None:
        self._experts, self._layers = dict(experts), layers
        self._saved: list[Tensor] = []
        self._hooks = [optimizer.register_step_pre_hook(self._save), optimizer.register_step_post_hook(self._restore)]
        self._hooks += (
            parameter.register_hook(_without_rows(ids))  # type: ignore[no-untyped-call]
            for parameter, ids in self._experts.items()
        )
        freezing = _Freezing()
        _optimizers[freezing] = weakref.ref(optimizer)
        _check_every_optimizer()
        self._mark(freezing)

    def remove(self) -> None:
        """Train the experts again."""
        for hook in self._hooks:
            hook.remove()
        self._mark(None)
        self._hooks, self._experts, self._layers = [], {}, []

    def _mark(self, freezing: _Freezing | None) -> None:
        """Mark the parameters and the layers, which look for the mark in their forward, or remove the marks."""
        for parameter in self._experts:
            setattr(parameter, FROZEN, freezing)
        for layer in self._layers:
            layer.frozen_experts = freezing

    # A step changes experts without a gradient too, by weight decay and momentum.
    @torch.no_grad()
    def _save(self, *_: object) -> None:
        self._saved = [parameter[ids] for parameter, ids in self._experts.items()]

    @torch.no_grad()
    def _restore(self, *_: object) -> None:
        for (parameter, ids), saved in zip(self._experts.items(), self._saved, strict=True):
            parameter[ids] = saved
        self._saved = []


def freeze_experts(
    model: nn.Module, experts: ExpertIds | Mapping[str, ExpertIds], optimizer: Optimizer
) -> FrozenExperts:
    """Freeze experts of the MoE layers of a model: their matrices and biases keep their values in every step.

    Their gradients are zero, so that they do not count in the norm of the gradients. The optimizer keeps a copy of the
    frozen experts during a step. The router stays trained. To freeze all experts, use ``requires_grad_(False)``.

    Args:
        model: model with `MoE` layers, or a layer, in one process or before `DistributedDataParallel`. Modules with
            frozen experts are refused by `maxmoe.parallelize` and do not run under FSDP.
        experts: ids of the experts to freeze, in every layer, or in some by their path, as in
            the statistics of `maxmoe.StatsAccumulator`.
        optimizer: optimizer that trains the experts, the only one.

    Returns:
        Frozen experts; ``remove()`` trains them again.

    Raises:
        TypeError: for another type than `torch.optim.Optimizer`.
        ValueError: for ids out of range, layers that are parallelized, have adapters or have frozen experts, and
            trained experts that the optimizer does not have.
    """
    chosen: dict[nn.Parameter, Tensor] = {}
    names: dict[nn.Parameter, str] = {}
    selected: Layers[ExpertIds] = layers_of(model, experts)
    for path, (layer, ids) in selected.items():
        check_layer(path, layer)
        check_not_frozen(path, layer)
        rows = torch.tensor(expert_ids(path, layer, ids), dtype=torch.int64)
        trained = {name: each for name, each in layer.experts.named_parameters() if each.requires_grad}
        chosen.update({parameter: rows.to(parameter.device) for parameter in trained.values()})
        names.update({parameter: f"{path}.experts.{name}" for name, parameter in trained.items()})
    check_optimizer(optimizer)
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter, name in names.items():
        if parameter not in held:
            raise ValueError(
                f"optimizer must train {name}, got {type(optimizer).__name__} without it, so that another one would "
                "change the frozen experts"
            )
    return FrozenExperts(chosen, [layer for layer, _ in selected.values()], optimizer)


@functools.cache
def _check_every_optimizer() -> None:
    """Register the check of optimizers, once per process."""
    register_optimizer_step_pre_hook(_refuse_frozen)


def _refuse_frozen(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Raise if an optimizer has parameters whose frozen experts are put back around the steps of another one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            freezing = getattr(parameter, FROZEN, None)
            known = None if freezing is None else _optimizers.get(freezing)
            if known is not None and known() is not optimizer:
                raise RuntimeError(
                    f"{type(optimizer).__name__} must not train parameters with frozen experts, which freeze_experts "
                    f"puts back around the steps of another optimizer only, got one of shape {tuple(parameter.shape)}: "
                    "call remove of its result, and freeze them again with this optimizer"
                )


def _without_rows(ids: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a hook that sets the gradients of some experts to zero."""

    def zero(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, ids, 0.0)

    return zero
