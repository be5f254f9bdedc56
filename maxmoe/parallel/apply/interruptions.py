"""What an exception leaves behind in a parallelized module, and how it is undone.

During a forward, modules hold gathered parameters in the place of DTensors, FSDP2 holds gathered parameters until the
end of the backward, and other ranks wait for this one in collectives. An exception, also a KeyboardInterrupt, may end a
forward or a backward anywhere. `leave_units` and `reset_fsdp` bring a module into the state before the call, without
communication. `AfterInterruption` asks, before the next call, whether all ranks have stopped at the same place, because
otherwise collectives of different calls would meet.
"""

import threading
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from maxmoe._torch import called_uncompiled, default_store, never_compiled
from maxmoe._torch.autograd import backward_id, call_after_backward, is_backward_running
from maxmoe._torch.compile import call_with_hooks, runs_uncompiled
from maxmoe.parallel.apply.fsdp import around_blocks, fsdp_modules, reset_fsdp
from maxmoe.parallel.apply.one_thread import ONE_THREAD
from maxmoe.parallel.apply.parameter_hooks import ParameterHooks, leave_units, num_running_units, tensors_of
from maxmoe.ranks.named_collectives import num_started
from maxmoe.sharding.mesh import Mesh


class GuardedModule(nn.Module):
    """Base class that `guard_calls` adds to the class of a module."""

    _call_guard: "CallGuard"

    @called_uncompiled
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the module; an exception leaves it as it was."""
        call: Any = super().__call__
        if runs_uncompiled.value and call.__func__ is nn.Module.__call__:
            call = partial(call_with_hooks, self)
        return self._call_guard.run(call, arguments, options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the class that has been extended: the class of a copy is made again, pickle does not find this one."""
        return _new_guarded, type(self).__bases__[1:], *super().__reduce_ex__(protocol)[2:]


@cache
def _guarded(cls: Any) -> Any:
    return type(cls.__name__, (GuardedModule, cls), {"__module__": cls.__module__})


def _new_guarded(cls: Any) -> Any:
    guarded = _guarded(cls)
    return guarded.__new__(guarded)


def guard_calls(module: nn.Module, mesh: Mesh, name: str) -> None:
    """Let every call of a module leave it as it was if an exception ends the call or its backward.

    Also calls of the model inside of wrappers, such as its `generate`.

    The hooks of a module do not suffice: torch calls none of them after a KeyboardInterrupt, and their order decides
    which of them an exception in another hook reaches. FSDP2 extends the class of a module in the same way; `name` is
    the name of the class before.
    """
    after = AfterInterruption(name, mesh, has_fsdp=any(fsdp_modules(module)))
    guard = CallGuard(module, after)
    for outer in around_blocks(module):
        outer._call_guard = guard  # type: ignore[assignment]
        cls: Any = type(outer)
        outer.__class__ = _guarded(cls)


class CallGuard:
    """Runs the calls of a module, and recovers it after an exception in a call or in its backward.

    Gradients that have been added to parameters stay, as in one process; those that FSDP2 has not reduced yet are lost.
    Calls of several threads at the same time are an error.
    """

    def __init__(self, module: nn.Module, after: "AfterInterruption") -> None:
        self._module, self._after = module, after
        self._depth = 0  # of a module that calls itself, and of a model in wrappers
        self._watched = -1

    @called_uncompiled
    def run(self, call: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the module."""
        num_running = self._begin()
        try:
            output = call(*arguments, **options)
            self._check_thread()
        except BaseException:
            self._recover_forward(num_running)
            raise
        finally:
            self._end()
        self._watch(output)
        return output

    @never_compiled
    def _begin(self) -> int:
        """Compare with other ranks after an interruption; return how many forwards of FSDP units run now."""
        if not is_backward_running():  # a recomputation belongs to the backward
            ONE_THREAD.enter()
            if self._depth == 0:
                try:
                    self._after.begin_call()
                except BaseException:
                    ONE_THREAD.leave()
                    raise
        self._depth += 1
        return num_running_units()

    @never_compiled
    def _check_thread(self) -> None:
        if not is_backward_running():
            ONE_THREAD.check()

    @never_compiled
    def _end(self) -> None:
        self._depth -= 1
        if not is_backward_running():
            ONE_THREAD.leave()

    @never_compiled
    def _recover_forward(self, num_running: int) -> None:
        leave_units(num_running)
        # The checkpoints of torch end a recomputation by an exception when it has computed what the backward needs. One
        # that ends the backward too is seen at its end.
        if self._depth == 1 and not is_backward_running():
            self._recover("forward")

    @never_compiled
    def _watch(self, output: Any) -> None:
        """Be told when the backward of an output begins."""
        begin = partial(self._begin_backward, threading.get_ident())
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]

    @never_compiled
    def _begin_backward(self, thread: int, _gradient: Tensor) -> None:
        """Tensor hook of the outputs: be told how the backward ends."""
        if backward_id() != self._watched:
            ONE_THREAD.enter(thread)
            self._watched = backward_id()
            call_after_backward(_EndOfBackward(self))

    def end_backward(self, *, has_failed: bool) -> None:
        """Recover after an exception in the backward."""
        try:
            if has_failed:
                self._recover("backward")
            else:
                ONE_THREAD.check()
        finally:
            ONE_THREAD.leave()

    def _recover(self, part: str) -> None:
        reset_fsdp(self._module)
        self._after.note(part)


class _EndOfBackward:
    """Called at the end of a backward, and destroyed before its exception is raised if there is one."""

    def __init__(self, guard: CallGuard) -> None:
        self._guard: CallGuard | None = guard

    def __call__(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end_backward(has_failed=False)

    def __del__(self) -> None:
        if self._guard is not None:
            self._guard.end_backward(has_failed=True)


class AfterInterruption:
    """Compares, before the first call after an interruption, where the ranks have stopped.

    If one rank alone has left a call, the others wait in its collectives. The next call of this rank would answer them
    with its own, which is an error or, if the sizes are equal, wrong numbers in silence. The ranks compare through the
    store of torch.distributed, because a collective would pair with one in which another rank still waits.

    `has_fsdp`: whether FSDP2 communicates in every call, besides the collectives that are counted.
    """

    _number = 0  # of the modules of this process, in the order in which all ranks have parallelized them

    def __init__(self, name: str, mesh: Mesh, *, has_fsdp: bool) -> None:
        self._name, self._mesh, self._has_fsdp = name, mesh, has_fsdp
        AfterInterruption._number += 1
        self._prefix = f"maxmoe.interruption/{AfterInterruption._number}"
        self._num_calls = self._num_interruptions = self._started = self._gathers = 0
        self._place: str | None = None

    def begin_call(self) -> None:
        """Note where a call begins; raise if ranks have been interrupted at different places."""
        self._check()
        self._num_calls += 1
        self._started, self._gathers = num_started(), ParameterHooks.num_gathers

    def note(self, part: str) -> None:
        """Note that an exception has ended the forward or the backward of the last call."""
        collectives, gathers = num_started() - self._started, ParameterHooks.num_gathers - self._gathers
        if collectives > 0 or self._has_fsdp:
            self._place = f"{part} of call {self._num_calls}, after {gathers} modules and {collectives} collectives"

    def _check(self) -> None:
        """Raise unless all ranks have been interrupted at the same place as this one, or this one has not been."""
        if self._place is None:
            return
        place, rank = self._place, self._mesh.rank
        self._num_interruptions += 1
        prefix = f"{self._prefix}/{self._num_interruptions}"
        store: Any = default_store()
        store.set(f"{prefix}/{rank}", place)
        problem = None
        for other in range(self._mesh.num_ranks):
            try:
                store.wait([f"{prefix}/{other}"], self._mesh.timeout)
            except RuntimeError:  # each kind of store has its own
                problem = f"rank {other} was not, or has not called it again for {self._mesh.timeout}"
                break
            theirs = store.get(f"{prefix}/{other}").decode()
            if theirs != place:
                problem = f"rank {other} in the {theirs}"
                break
        if problem is not None:
            raise RuntimeError(
                f"rank {rank} was interrupted by an exception in the {place} of {self._name}, and {problem}: the "
                "collectives of the ranks do not belong together any more. End all ranks, and resume from a "
                "checkpoint. To leave out a batch, do so on all ranks"
            )
        self._place = None

    def __deepcopy__(self, _memo: object) -> "AfterInterruption":
        """Return one for a copy of the module, which all ranks make."""
        return AfterInterruption(self._name, self._mesh, has_fsdp=self._has_fsdp)
