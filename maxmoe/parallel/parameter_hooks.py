"""Hooks of a FSDP unit: gather parameters before its forward, free them after it, refill them before its backward.

Autograd saves tensors and views that share the storage of a gathered parameter. The storage is freed, not the tensors;
see `FreedStorage`.

The order of events for one unit is

1. forward pre-hook: all-gather, and the gathered tensors replace the DTensors as attributes;
2. forward of the unit;
3. forward hook: the DTensors are put back, the gathered storages freed, tensor hooks registered on the outputs;
4. tensor hook, when the backward reaches an output: all-gather again into the storages;
5. backward of the unit and, for each parameter, of its all-gather in step 1, which reduces the gradient.

Do not backpropagate from tensors captured by forward hooks inside the unit: such a backward reaches the freed
parameters without passing an output of the unit, so that step 4 is skipped.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from maxmoe._torch import parameter_in_place, put_in_place, tree_leaves, version_of
from maxmoe.parallel.plan import ParameterPlan
from maxmoe.recompute.freed_storage import FreedStorage
from maxmoe.recompute.selective import is_recomputation
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.redistribute import redistribute_parameter


class ParameterHooks:
    """Keeps the parameters of one FSDP unit gathered during its forward and its backward."""

    def __init__(self, parameters: Mapping[str, ParameterPlan]) -> None:
        self._plans = parameters
        self._stored: Mapping[str, Tensor] = {}
        self._fsdp_modules: Sequence[FSDPModule] = ()
        self._replaced: list[tuple[nn.Module, str, Tensor]] = []
        self._gathered: list[GatheredParameter] = []
        self._ungathered: list[tuple[Tensor, ParameterVersion]] = []

    def find_stored(self, model: nn.Module) -> None:
        """Find the parameters that the optimizer holds, and the FSDP2 modules that shard them.

        Called once FSDP2 has been applied: it replaces parameters by shards, and by other objects in the forward.
        """
        self._stored = dict(model.named_parameters())
        blocks = dict.fromkeys(plan.fsdp_block for plan in self._plans.values() if plan.fsdp_block is not None)
        modules = (model.get_submodule(path) for path in blocks)
        self._fsdp_modules = [module for module in modules if isinstance(module, FSDPModule)]

    @not_compiled
    def gather(self, unit: nn.Module, _arguments: tuple[Any, ...]) -> None:
        """Forward pre-hook: replace the DTensor parameters by gathered plain tensors."""
        # By id of the parameter, so that a parameter that several children share is gathered once. All ranks gather in
        # the order of the plans.
        tensors: dict[int, Tensor] = {}
        for path, plan in self._plans.items():
            prefix, _, name = path.rpartition(".")
            owner = unit.get_submodule(prefix)
            parameter = _parameter(owner, name)
            if id(parameter) not in tensors:
                tensors[id(parameter)] = redistribute_parameter(parameter, plan.gathering)
                if _has_later_backward():
                    self._remember(tensors[id(parameter)], owner, name, plan)
            self._replaced.append((owner, name, parameter))
            put_in_place(owner, name, tensors[id(parameter)])

    def _remember(self, tensor: Tensor, owner: nn.Module, name: str, plan: ParameterPlan) -> None:
        """Keep what the backward needs of a parameter: how to gather it again, and its version."""
        version = ParameterVersion(plan.name, self._stored[plan.name])
        if plan.is_gathered:
            self._gathered.append(GatheredParameter(tensor, _gather_again(owner, name, plan), version))
        else:
            self._ungathered.append((tensor, version))

    @not_compiled
    def free(self, _unit: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        """Forward hook: put the DTensors back, free the gathered tensors, and refill them in the backward."""
        while self._replaced:
            owner, name, parameter = self._replaced.pop()
            put_in_place(owner, name, parameter)
        gathered, self._gathered = self._gathered, []
        ungathered, self._ungathered = self._ungathered, []
        if not _has_later_backward():
            return

        def refill(_gradient: Tensor) -> None:
            for tensor, version in ungathered:
                if version.is_outdated:
                    # Autograd has saved tensors that share memory with the local tensor or with FSDP's unsharded
                    # parameter, and does not see that the optimizer modified them through the DTensor. With the version
                    # incremented, it raises for those that the backward needs.
                    increment_version(tensor)
            # Each output calls this. The first call fills the storages, later ones find them filled.
            if not any(parameter.is_needed for parameter in gathered):
                return
            for parameter in gathered:
                parameter.check_version()
            # FSDP gathers its parameters in a hook on the output of its module. If that is an output of this unit too,
            # FSDP's hook comes later. For parameters that are unsharded already, this does nothing.
            for fsdp_module in self._fsdp_modules:
                fsdp_module.unshard()
            for parameter in gathered:
                parameter.refill()

        for gathered_parameter in gathered:
            gathered_parameter.free()
        for tensor in tree_leaves(output):
            if (gathered or ungathered) and isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(refill)  # type: ignore[no-untyped-call]


class ParameterVersion:
    """Version of a parameter in the forward, to check in the backward that it has not been modified."""

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self._parameter = parameter
        self._versions = _versions(parameter)

    @property
    def is_outdated(self) -> bool:
        """Whether the parameter has been modified since the forward."""
        return _versions(self._parameter) != self._versions


@torch.no_grad()
def _versions(parameter: Tensor) -> tuple[int, int]:
    """Return the versions of a DTensor and of its local tensor, because optimizers modify either in place."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return version_of(parameter), version_of(local)


class GatheredParameter:
    """A gathered parameter whose storage is freed between forward and backward; `gather` gathers it again."""

    def __init__(self, tensor: Tensor, gather: Callable[[], Tensor], version: ParameterVersion) -> None:
        self._storage = FreedStorage(tensor)
        self._gather = gather
        self._version = version

    def free(self) -> None:
        """Free the storage."""
        self._storage.free()

    @property
    def is_needed(self) -> bool:
        """Whether the storage is freed and autograd has saved tensors that share it; equal on all ranks.

        The collective of the forward, which holds its output, has ended on all of them.
        """
        return self._storage.is_needed

    def check_version(self) -> None:
        """Raise, on every rank and before any collective, if the parameter is needed and has been modified."""
        if self.is_needed and self._version.is_outdated:
            raise RuntimeError(
                f"{self._version.name} is needed for gradient computation, but has been modified by an inplace "
                "operation since the forward: call backward before optimizer.step()"
            )

    @torch.no_grad()
    def refill(self) -> None:
        """Gather the parameter again if it is needed."""
        if self.is_needed:
            self._storage.fill(self._gather())


def _has_later_backward() -> bool:
    """Return whether a backward may follow this forward after other modules have run.

    A forward inside a backward is a recomputation of activation checkpointing. Its saved tensors are used at once, so
    freeing them would gather every parameter a third time.
    """
    return torch.is_grad_enabled() and not is_recomputation()


def _gather_again(owner: nn.Module, name: str, plan: ParameterPlan) -> Callable[[], Tensor]:
    # The parameter is looked up again, because FSDP has replaced it by its sharded or unsharded state in between.
    return lambda: redistribute_parameter(_parameter(owner, name), plan.gathering)


def _parameter(owner: nn.Module, name: str) -> DTensor:
    parameter = parameter_in_place(owner, name)
    assert isinstance(parameter, DTensor)
    return parameter
