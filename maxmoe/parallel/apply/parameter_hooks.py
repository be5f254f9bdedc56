"""Hooks of a FSDP unit: gather parameters before its forward, free them after it, refill them before its backward.

Autograd saves tensors and views that share the storage of a gathered parameter. The storage is freed, not the tensors;
see `FreedStorage`.

The order of events for one unit is

1. forward pre-hook: all-gather, and the gathered tensors replace the DTensors as attributes;
2. forward of the unit;
3. forward hook: the DTensors are put back, the gathered storages freed, tensor hooks registered on the outputs;
4. tensor hook, when the backward reaches the first output: all-gather again, into the storages that autograd has kept;
5. backward of the unit and, for each parameter, of its all-gather in step 1, which reduces the gradient.

Which parameters are gathered again is in the plan, and equal on all ranks. Whether autograd has kept a storage is not:
the thread of a collective may hold its output for some time after the collective has ended, on one rank and not on
another. It decides only what is done with the gathered values.

If tensors of the output cannot be found, because they are in objects that are no pytree, nothing is freed in step 3,
and parameters that an optimizer modifies before the backward are not noticed.

Do not backpropagate from tensors captured by forward hooks inside the unit: such a backward reaches the freed
parameters without passing an output of the unit, so that step 4 is skipped.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from maxmoe._torch import base_of_view, local_version_of, never_compiled, parameter_table, tree_leaves, version_of
from maxmoe._torch.fsdp import make_root
from maxmoe.parallel.plan.plan import ModulePlan, ParameterPlan
from maxmoe.recompute.freed_storage import FreedStorage
from maxmoe.recompute.selective import is_checkpointed
from maxmoe.sharding.redistribute import Redistribution, redistribute_parameters


class Place(NamedTuple):
    """A parameter as the attribute `name` of the module that owns it, with its plan."""

    owner: nn.Module
    name: str
    plan: ParameterPlan

    def gather(self) -> Tensor:
        """Gather the parameter again, which FSDP2 has replaced by its sharded or unsharded state in between."""
        parameter = parameter_table(self.owner)[self.name]
        assert isinstance(parameter, DTensor)
        again = (parameter, self.plan.gathering, f"{self.plan.name}, again")
        return redistribute_parameters([again], jointly=False)[0]


class ParameterHooks:
    """Keeps the parameters of one FSDP unit, or of a block that reduces gradients, gathered in forward and backward."""

    num_gathers = 0  # of all units of this process

    def __init__(self, unit: ModulePlan, fsdp_blocks: Mapping[str, Any]) -> None:
        self._places = []
        for path, plan in (unit.reduced | unit.parameters).items():
            owner, _, name = path.rpartition(".")
            self._places.append(Place(unit.module.get_submodule(owner), name, plan))
        blocks = dict.fromkeys(plan.fsdp_block for _, _, plan in self._places if plan.fsdp_block is not None)
        self._fsdp_modules = [fsdp_blocks[path] for path in blocks]
        self._fsdp_root = fsdp_blocks.get("")
        self._reduces_jointly = all(place.plan.reduced_by is not None for place in self._places)
        self._stored: dict[str, Tensor] = {}

    def keep_stored(self) -> None:
        """Keep the parameters that the optimizer holds; called when FSDP2 has replaced them by their shards."""
        found = ((plan.name, parameter_table(owner)[name]) for owner, name, plan in self._places)
        self._stored = {name: parameter for name, parameter in found if parameter is not None}

    @never_compiled
    def gather(self, _unit: nn.Module, _arguments: tuple[Any, ...]) -> None:
        """Forward pre-hook: replace the DTensor parameters by gathered plain tensors."""
        if self._fsdp_root is not None:
            make_root(self._fsdp_root)
        ParameterHooks.num_gathers += 1
        call = UnitCall(self)
        _RUNNING.append(call)
        # By name, so that a parameter that several children share is gathered once. All ranks gather in the order of
        # the plans.
        found: dict[str, tuple[DTensor, Place]] = {}
        for place in self._places:
            parameter = parameter_table(place.owner)[place.name]
            if isinstance(parameter, DTensor):  # else gathered by a unit whose forward calls this one
                call.replaced.append((place, parameter))
                found.setdefault(place.plan.name, (parameter, place))
        named = [(parameter, _gathering_now(parameter, place.plan), name) for name, (parameter, place) in found.items()]
        tensors = redistribute_parameters(named, jointly=self._reduces_jointly)
        gathered = dict(zip(found, tensors, strict=True))
        if _has_later_backward():
            for name, (_, place) in found.items():
                version = ParameterVersion(name, self._stored[name])
                if not place.plan.is_gathered:
                    call.ungathered.append((gathered[name], version))
                elif place.plan.is_saved:
                    call.gathered.append(GatheredParameter(FreedStorage(gathered[name]), place.gather, version))
        for place, _ in call.replaced:
            parameter_table(place.owner)[place.name] = gathered[place.plan.name]

    @never_compiled
    def free(self, _unit: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        """Forward hook: put the DTensors back, free the gathered tensors, and refill them in the backward."""
        if not _RUNNING or _RUNNING[-1].hooks is not self:  # another hook has raised before `gather`
            return
        call = _RUNNING.pop()
        call.put_back()
        gathered, ungathered = call.gathered, call.ungathered  # both empty without a later backward
        tensors = tensors_of(output) if gathered or ungathered else []
        if not tensors:
            return

        def refill(_gradient: Tensor) -> None:
            for tensor, version in ungathered:
                if version.is_outdated:
                    # Autograd has saved tensors that share memory with the local tensor or with FSDP's unsharded
                    # parameter, and does not see that the optimizer modified them through the DTensor. With the version
                    # incremented, autograd raises if the backward reads such a tensor.
                    increment_version(tensor)
            if not gathered or call.is_refilled:  # by the hook of another output
                return
            for parameter in gathered:
                parameter.check_version()
            call.is_refilled = True
            # FSDP gathers its parameters in a hook on the output of its module. If that is an output of this unit too,
            # FSDP's hook comes later. For parameters that are unsharded already, this does nothing.
            for fsdp_module in self._fsdp_modules:
                fsdp_module.unshard()
            for parameter in gathered:
                parameter.refill()

        for gathered_parameter in gathered:
            gathered_parameter.storage.free()
        for tensor in tensors:
            # An in-place operation on a view replaces the history of the view, and with it the hook, by a history that
            # ends in the history of the base.
            for hooked in (tensor, base_of_view(tensor)):
                if hooked is not None and hooked.requires_grad:
                    hooked.register_hook(refill)  # type: ignore[no-untyped-call]


@dataclasses.dataclass
class UnitCall:
    """Parameters of one forward of a unit: DTensors to put back, gathered tensors, tensors that share their memory."""

    hooks: ParameterHooks
    replaced: list[tuple[Place, Tensor]] = dataclasses.field(default_factory=list)
    gathered: list["GatheredParameter"] = dataclasses.field(default_factory=list)
    ungathered: list[tuple[Tensor, "ParameterVersion"]] = dataclasses.field(default_factory=list)
    is_refilled: bool = False  # by the backward

    def put_back(self) -> None:
        """Put the DTensors in the place of the gathered tensors."""
        for place, parameter in self.replaced:
            parameter_table(place.owner)[place.name] = parameter


# Forwards of units that run now in this process, one inside of the other.
_RUNNING: list[UnitCall] = []


def num_running_units() -> int:
    """Return the number of forwards of FSDP units that run now."""
    return len(_RUNNING)


def leave_units(num_running: int = 0) -> None:
    """Put the DTensors back that interrupted forwards have replaced, and leave the outer `num_running` forwards."""
    while len(_RUNNING) > num_running:
        _RUNNING.pop().put_back()


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of an output; none if it has an object in which there may be others."""
    tensors, values = [], list(tree_leaves(output))
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                values += tree_leaves(getattr(value, field.name, None))
        elif not isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device | None):
            return []
    return tensors


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


def _versions(parameter: Tensor) -> tuple[int, int]:
    """Return the versions of a DTensor and of its local tensor, because optimizers modify either in place."""
    return version_of(parameter), local_version_of(parameter)


class GatheredParameter(NamedTuple):
    """A gathered parameter whose storage is freed between forward and backward; `gather` gathers it again."""

    storage: FreedStorage
    gather: Callable[[], Tensor]
    version: ParameterVersion

    def check_version(self) -> None:
        """Raise, on every rank and before any collective, if the parameter has been modified since the forward."""
        if self.version.is_outdated:
            raise RuntimeError(
                f"{self.version.name} is needed for gradient computation, but has been modified by an inplace "
                "operation since the forward: call backward before optimizer.step()"
            )

    @torch.no_grad()
    def refill(self) -> None:
        """Gather the parameter again, and fill the storage if tensors still share it on this rank."""
        self.storage.fill(self.gather())


def _has_later_backward() -> bool:
    """Return whether a backward of this forward may follow after other modules have run.

    Not under activation checkpointing: the forward saves nothing, and the saved tensors of the recomputation are used
    at once, so that freeing them would gather every parameter a third time.
    """
    return torch.is_grad_enabled() and not is_checkpointed()


def _gathering_now(parameter: DTensor, plan: ParameterPlan) -> Redistribution:
    """Return the redistribution of a parameter before a forward, gathered by FSDP2 or not.

    FSDP2 has not gathered it in a call of a module inside of the one that does. If `parallelize` got a wrapper around a
    model, such as a PeftModel, `generate` calls the model without the wrapper.
    """
    if plan.fsdp_block is None or parameter.placements != plan.stored.placements:
        return plan.gathering
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{plan.name} is gathered in the forward of {plan.fsdp_block or 'the module given to parallelize'}, got a "
            "call of a module inside of it: call that module, or this one under torch.no_grad()"
        )
    return Redistribution((plan.stored, plan.used), (plan.grad_used, plan.stored))
