"""The hooks of a gather unit: gather parameters before its forward, free them after it, refill them for its backward.

Autograd does not save the gathered parameter itself but tensors and views that share its storage; see `FreedStorage`.

Do not backpropagate from tensors captured by forward hooks inside the unit: the storage is refilled when the backward
reaches an output of the unit, and such a tensor leads to the freed parameters without passing one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from maxmoe.nn.freed_storage import FreedStorage
from maxmoe.nn.recompute import is_recomputation
from maxmoe.parallel.plan import ParameterPlan
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.redistribute import redistribute_parameter


class ParameterHooks:
    """Gathers the parameters of one gather unit for as long as its forward or its backward runs.

    Args:
        parameters: of the unit, by their path within it.
    """

    def __init__(self, parameters: Mapping[str, ParameterPlan]) -> None:
        self._plans = parameters
        self._replaced: list[tuple[nn.Module, str, Tensor]] = []
        self._gathered: list[GatheredParameter] = []

    def register(self, unit: nn.Module) -> None:
        """Install the hooks."""
        unit.register_forward_pre_hook(self._gather)
        # always_call: the DTensors must be back in their place after a forward that raised, too.
        unit.register_forward_hook(self._free, always_call=True)

    @not_compiled
    def _gather(self, unit: nn.Module, _arguments: tuple[Any, ...]) -> None:
        """Put gathered plain tensors in the place of the DTensor parameters."""
        tensors: dict[int, Tensor] = {}  # a parameter that children of the unit share is gathered once
        for path, plan in self._plans.items():
            prefix, _, name = path.rpartition(".")
            owner = unit.get_submodule(prefix)
            parameter = _parameter(owner, name)
            if id(parameter) not in tensors:
                tensors[id(parameter)] = _gathered_tensor(parameter, plan)
                if plan.is_gathered:
                    gather_again = _gather_again(owner, name, plan)
                    self._gathered.append(GatheredParameter(tensors[id(parameter)], gather_again))
            self._replaced.append((owner, name, parameter))
            # Not setattr: nn.Module accepts only nn.Parameter in the place of one, and this is part of the graph.
            owner._parameters[name] = tensors[id(parameter)]  # type: ignore[assignment]

    @not_compiled
    def _free(self, _unit: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        """Put the DTensors back, free the gathered ones and refill them when the backward reaches an output."""
        while self._replaced:
            owner, name, parameter = self._replaced.pop()
            owner._parameters[name] = parameter  # type: ignore[assignment]
        gathered, self._gathered = self._gathered, []
        # A forward inside a backward is a recomputation of activation checkpointing. Its saved tensors are used at
        # once, so freeing them here would gather every parameter a third time.
        if not torch.is_grad_enabled() or is_recomputation():
            return

        def refill(_gradient: Tensor) -> None:
            for parameter in gathered:
                parameter.refill()

        for gathered_parameter in gathered:
            gathered_parameter.free()
        for tensor in tree_leaves(output):
            if gathered and isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(refill)  # type: ignore[no-untyped-call]


class GatheredParameter:
    """A gathered parameter whose storage is freed between forward and backward.

    Args:
        tensor: the gathered parameter; nothing else may need its storage.
        gather: gathers the same tensor again.
    """

    def __init__(self, tensor: Tensor, gather: Callable[[], Tensor]) -> None:
        self._storage = FreedStorage(tensor)
        self._gather = gather

    def free(self) -> None:
        """Free the storage."""
        self._storage.free()

    @torch.no_grad()
    def refill(self) -> None:
        """Gather again, if the storage is needed and empty."""
        if self._storage.is_needed:
            self._storage.fill(self._gather())


def _gathered_tensor(parameter: DTensor, plan: ParameterPlan) -> Tensor:
    # FSDP2 refills its unsharded parameters when the backward reaches the output of its module. Tensor hooks run in the
    # order of their registration, and those of this file come first: on the output of the whole model, which is one
    # FSDP module and may be one gather unit, FSDP has not gathered yet, and the parameter is found as it is stored.
    is_unsharded = parameter.placements == plan.unsharded.placements
    source = plan.unsharded if is_unsharded else plan.stored
    return redistribute_parameter(
        parameter, source, plan.used, grad_source=plan.grad_used, grad_target=plan.grad_unsharded
    )


def _gather_again(owner: nn.Module, name: str, plan: ParameterPlan) -> Callable[[], Tensor]:
    # The parameter is looked up anew: FSDP replaces it between its sharded and its unsharded state.
    return lambda: _gathered_tensor(_parameter(owner, name), plan)


def _parameter(owner: nn.Module, name: str) -> DTensor:
    parameter = owner._parameters[name]
    assert isinstance(parameter, DTensor)
    return parameter
