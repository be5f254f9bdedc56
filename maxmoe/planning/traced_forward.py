"""What the forward of a model saves for the backward and computes, traced without values.

A model is called with tensors that have shapes alone. A storage that a module with declared `saved_tensors` saves is
counted by its declaration, every other one here, once, for the module that saves it first. Parameters and buffers are
not counted. A layer of torch inside of a declared module belongs to that module.
"""

import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from maxmoe._torch import (
    FakeTensorMode,
    TorchDispatchMode,
    attention_of_cpu,
    storage_id,
    tree_leaves,
    without_log_of_fake_tensors,
)
from maxmoe._torch.copies import copy_modules
from maxmoe.declaration import Absent, declaration_of
from maxmoe.nn import Checkpointed, set_recompute
from maxmoe.parallel.plan.fsdp_units import has_forward
from maxmoe.parallel.plan.plan import enclosing

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Trace(NamedTuple):
    """Result of `trace`."""

    # Bytes, by the path of the module that saves a storage first, and the paths of the modules that can be recomputed
    # and take it as an argument.
    saved: Mapping[tuple[str, frozenset[str]], int]
    flops: Mapping[str, int]  # of matrix products, convolutions and attention in a forward, by the path of the module
    problem: str | None = None  # why the forward cannot be traced


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-any-return, no-untyped-call]


FLOPS = {**flop_registry, attention_of_cpu: _attention_flops}
NOTHING = Trace({}, {})
Result = TypeVar("Result")


def _once_per_model(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function of a model and other arguments: it runs once for the same arguments."""
    known: weakref.WeakKeyDictionary[nn.Module, dict[Any, Result]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(model: nn.Module, *arguments: Any) -> Result:
        of_model = known.setdefault(model, {})
        if arguments not in of_model:
            of_model[arguments] = function(model, *arguments)
        return of_model[arguments]

    return cached


@_once_per_model
def traced_modules(model: nn.Module) -> frozenset[str]:
    """Return the paths of the modules that are traced, because neither they nor a module around them declares."""
    modules = dict(model.named_modules())

    def is_traced(path: str) -> bool:
        for outer in enclosing(path):
            if declaration_of(modules[outer]).saved_tensors is not None:
                return False
            if not type(modules[outer]).__module__.startswith("torch.nn."):
                break
        return has_forward(modules[path])

    traced = frozenset(path for path in modules if is_traced(path))
    return traced if any(not isinstance(modules[path], Absent | nn.Identity) for path in traced) else frozenset()


@_once_per_model
def trace(
    model: nn.Module, num_sequences: int, length: int, shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
) -> Trace:
    """Trace the forward of a model in train mode; `shapes` are the local shapes of parameters that are not whole."""
    if not traced_modules(model):
        return NOTHING
    first_error: Exception | None = None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = _copy_for_trace(model, dict(shapes), mode)
    with mode, without_log_of_fake_tensors():
        for positional, named in _arguments(model, num_sequences, length):
            hooked = copy_modules(copied)
            try:
                recorder = _Recorder(hooked, traced_modules(model), mode)
                with recorder, saved_tensors_hooks(recorder.save, _never), torch.enable_grad():
                    hooked(*positional, **named)
            except Exception as error:
                first_error = first_error or error
            else:
                return recorder.trace()
    reason = str(first_error).partition("\n")[0]
    problem = (
        f"What {type(model).__name__} saves and computes beside the modules that declare it is not counted, because "
        f"its forward cannot be traced with {num_sequences} sequences of {length} tokens: "
        f"{type(first_error).__name__}: {reason}. If it takes no such sequences, give another sequence_length; if it "
        "takes other inputs, example_inputs of maxmoe.parallel.Declaration."
    )
    return Trace({}, {}, problem)


def _copy_for_trace(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], mode: FakeTensorMode) -> nn.Module:
    """Copy a model in train mode, with separate fake parameters and buffers."""
    copied = copy_modules(model).train()
    set_recompute(copied, ())
    replaced: dict[int, Tensor] = {}
    for name, tensor in [*_tensors(copied)]:
        path, _, own_name = name.rpartition(".")
        shape, is_parameter = shapes.get(name, tuple(tensor.shape)), isinstance(tensor, nn.Parameter)
        # An operator in place, without a fake argument, would change the tensor itself.
        new = mode.from_tensor(tensor) if is_parameter else tensor.clone()
        if tensor.is_meta or shape != tuple(tensor.shape):
            with mode:
                new = torch.empty(shape, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)
                new = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
        setattr(copied.get_submodule(path), own_name, replaced.setdefault(id(tensor), new))
    for module in copied.modules():
        if declaration_of(module).saved_tensors is not None:
            module.training = False  # of a MoE layer: what watches a training sees nothing
    return copied


def _never(_saved: None) -> Tensor:
    raise AssertionError("there is no backward")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model, shared ones under each of their paths."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _arguments(model: nn.Module, num_sequences: int, length: int) -> Iterator[Arguments]:
    """Yield arguments with which a model may be called, the most likely ones first."""
    declaration = declaration_of(model)
    parts, parameters = declaration.pipeline_parts, [*model.parameters()]
    is_later_stage = parts is not None and any(isinstance(model.get_submodule(path), Absent) for path in parts.first)
    if declaration.example_inputs is not None and not is_later_stage:
        inputs = declaration.example_inputs(num_sequences, length)
        if not isinstance(inputs, tuple | dict):
            raise TypeError(f"example_inputs must return a tuple or a dict of arguments, got {type(inputs).__name__}")
        yield ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        return
    first = next((parameter for parameter in parameters if parameter.is_floating_point()), torch.empty(0))
    options: dict[str, Any] = {"device": "cpu" if first.is_meta else first.device}
    tensors = [
        torch.empty(num_sequences, length, size, dtype=first.dtype, **options)
        for size in dict.fromkeys(parameter.shape[-1] for parameter in parameters if parameter.dim())
    ]
    owners = (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    has_ids = isinstance(next(owners, None), nn.Embedding)
    tensors.insert(0 if has_ids else len(tensors), torch.zeros(num_sequences, length, dtype=torch.int64, **options))
    required = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    for tensor in tensors:
        yield (tensor.requires_grad_(is_later_stage and tensor.is_floating_point()),) * max(len(required), 1), {}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what a forward saves and computes, by the module that runs."""

    def __init__(self, model: nn.Module, traced: frozenset[str], mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traced = traced
        self._running = [""]
        # By storage, the module that saves it first. The tensors are kept, so that no other storage gets the same id.
        self._saved_by: dict[int, str] = {}
        self._tensors: dict[int, Tensor] = {}
        self._not_counted: set[int] = set()
        self._argument_of: dict[int, set[str]] = defaultdict(set)
        self._flops: dict[str, int] = defaultdict(int)
        for _, tensor in _tensors(model):
            self._not_counted.add(self._storage(tensor))
            if not hasattr(tensor, "fake_mode"):  # autograd saves the tensor itself, or what operators make of it
                self._not_counted.add(self._storage(mode.from_tensor(tensor)))
        for path, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._enter, path), with_kwargs=True)
            module.register_forward_hook(self._leave)

    def trace(self) -> Trace:
        """Return what a forward has saved and computed."""
        saved: dict[tuple[str, frozenset[str]], int] = defaultdict(int)
        for storage, path in self._saved_by.items():
            if storage not in self._not_counted:
                where = path, frozenset(self._argument_of[storage])
                saved[where] += self._tensors[storage].untyped_storage().nbytes()
        return Trace(dict(saved), dict(self._flops))

    def save(self, tensor: Tensor) -> None:
        """Record a tensor that autograd saves."""
        storage, path = self._storage(tensor), self._running[-1]
        self._saved_by.setdefault(storage, path)
        if path not in self._traced:
            self._not_counted.add(storage)

    def _storage(self, tensor: Tensor) -> int:
        self._tensors.setdefault(storage_id(tensor), tensor)
        return storage_id(tensor)

    def _enter(self, path: str, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._running.append(path)
        for tensor in tree_leaves((positional, named)) if isinstance(module, Checkpointed) else ():
            if isinstance(tensor, Tensor):
                self._argument_of[self._storage(tensor)].add(path)

    def _leave(self, *_call: Any) -> None:
        self._running.pop()

    def __torch_dispatch__(
        self, function: Any, _types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        """Count the floating-point operations of an operator."""
        result = function(*arguments, **(options or {}))
        formula = FLOPS.get(function.overloadpacket)
        if formula is not None and self._running[-1] in self._traced:
            self._flops[self._running[-1]] += formula(*arguments, **(options or {}), out_val=result)
        return result
