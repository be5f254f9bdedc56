"""The hooks of a FSDP unit: gather parameters before its forward, free them after it, refill them for its backward.

Autograd does not save the gathered parameter itself but tensors and views that share its storage; see `FreedStorage`.

Do not backpropagate from tensors captured by forward hooks inside the unit: the storage is refilled when the backward
reaches an output of the unit, and such a tensor leads to the freed parameters without passing one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from maxmoe._torch import parameter_in_place, put_in_place, tree_leaves, version_of
from maxmoe.parallel.plan import ParameterPlan
from maxmoe.recompute.freed_storage import FreedStorage
from maxmoe.recompute.selective import is_recomputation
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.redistribute import redistribute_parameter


class ParameterHooks:
    """Gathers the parameters of one FSDP unit for as long as its forward or its backward runs.

    Args:
        parameters: plans of the parameters of the unit, by their path within it.

    Attributes:
        stored: the parameters as the optimizer holds them, by the path in the model; empty until all hooks and FSDP
            are registered. FSDP replaces a parameter by another object while it is unsharded.
    """

    def __init__(self, parameters: Mapping[str, ParameterPlan]) -> None:
        self._plans = parameters
        self.stored: Mapping[str, Tensor] = {}
        self._replaced: list[tuple[nn.Module, str, Tensor]] = []
        self._gathered: list[GatheredParameter] = []
        self._unsharded: list[tuple[Tensor, ParameterVersion]] = []

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
                tensor = _gathered_tensor(parameter, plan)
                version = ParameterVersion(plan.name, self.stored[plan.name])
                if plan.is_gathered:
                    gather_again = _gather_again(owner, name, plan)
                    self._gathered.append(GatheredParameter(tensor, gather_again, version))
                else:
                    self._unsharded.append((tensor, version))
                tensors[id(parameter)] = tensor
            self._replaced.append((owner, name, parameter))
            put_in_place(owner, name, tensors[id(parameter)])

    @not_compiled
    def _free(self, _unit: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        """Put the DTensors back, free the gathered ones and refill them when the backward reaches an output."""
        while self._replaced:
            owner, name, parameter = self._replaced.pop()
            put_in_place(owner, name, parameter)
        gathered, self._gathered = self._gathered, []
        unsharded, self._unsharded = self._unsharded, []
        # A forward inside a backward is a recomputation of activation checkpointing. Its saved tensors are used at
        # once, so freeing them here would gather every parameter a third time.
        if not torch.is_grad_enabled() or is_recomputation():
            return

        def refill(_gradient: Tensor) -> None:
            for tensor, version in unsharded:
                if version.is_outdated:
                    # Autograd has saved tensors that share memory with the local tensor or with what FSDP gathers, and
                    # sees no operator on the DTensor modify them. Now it raises for those that the backward needs.
                    increment_version(tensor)
            for parameter in gathered:
                parameter.refill()

        for gathered_parameter in gathered:
            gathered_parameter.free()
        for tensor in tree_leaves(output):
            if (gathered or unsharded) and isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(refill)  # type: ignore[no-untyped-call]


class ParameterVersion:
    """The state of a parameter in the forward, to be compared in the backward.

    Args:
        name: path of the parameter in the model.
        parameter: as the optimizer holds it.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self._parameter = parameter
        self._versions = _versions(parameter)

    @property
    def is_outdated(self) -> bool:
        """Whether the parameter has been modified since."""
        return _versions(self._parameter) != self._versions


@torch.no_grad()
def _versions(parameter: Tensor) -> tuple[int, int]:
    """Return the version of a DTensor, and that of its local tensor: optimizers modify either in place."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return version_of(parameter), version_of(local)


class GatheredParameter:
    """A gathered parameter whose storage is freed between forward and backward.

    Args:
        tensor: the gathered parameter; nothing else may need its storage.
        gather: gathers the same tensor again.
        version: of the parameter that was gathered.
    """

    def __init__(self, tensor: Tensor, gather: Callable[[], Tensor], version: ParameterVersion) -> None:
        self._storage = FreedStorage(tensor)
        self._gather = gather
        self._version = version

    def free(self) -> None:
        """Free the storage."""
        self._storage.free()

    @torch.no_grad()
    def refill(self) -> None:
        """Gather again, if the storage is needed and empty.

        Raises:
            RuntimeError: on all ranks alike, before the all-gather, if the values of the forward are gone.
        """
        if not self._storage.is_needed:
            return
        if self._version.is_outdated:
            raise RuntimeError(
                f"{self._version.name} is needed for gradient computation, but has been modified by an inplace "
                "operation since the forward: call backward before optimizer.step()"
            )
        self._storage.fill(self._gather())


def _gathered_tensor(parameter: DTensor, plan: ParameterPlan) -> Tensor:
    # FSDP2 refills its unsharded parameters when the backward reaches the output of its module. Tensor hooks run in the
    # order of their registration, and those of this file come first: on the output of the whole model, which is one
    # FSDP module and may be one FSDP unit, FSDP has not gathered yet, and the parameter is found as it is stored.
    is_unsharded = parameter.placements == plan.unsharded.placements
    source = plan.unsharded if is_unsharded else plan.stored
    return redistribute_parameter(
        parameter, source, plan.used, grad_source=plan.grad_used, grad_target=plan.grad_unsharded
    )


def _gather_again(owner: nn.Module, name: str, plan: ParameterPlan) -> Callable[[], Tensor]:
    # The parameter is looked up anew: FSDP replaces it between its sharded and its unsharded state.
    return lambda: _gathered_tensor(_parameter(owner, name), plan)


def _parameter(owner: nn.Module, name: str) -> DTensor:
    parameter = parameter_in_place(owner, name)
    assert isinstance(parameter, DTensor)
    return parameter
