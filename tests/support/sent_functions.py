"""Pickles functions and classes that have no name in a module: local ones and lambdas.

pickle sends a function as its name in a module. A function without a name is sent as its code, its attributes and the
variables that it closes over. Its globals are the module of the same name in the other process, not a copy.
"""

import importlib
import io
import marshal
import pickle
import sys
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor


def dumps(value: Any) -> tuple[bytes, list[str]]:
    """Return the bytes for `pickle.loads`, and the names of the modules whose functions and classes are in them."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), [*pickler.modules]


ATTRIBUTES = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__", "__annotations__")


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.modules: dict[str, None] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a value; NotImplemented for values that pickle can send."""
        if isinstance(value, FunctionType | type):
            self.modules.setdefault(_module_of(value))
            if not _has_name(value):
                return (_reduce_function if isinstance(value, FunctionType) else _reduce_class)(value)
        if isinstance(value, CodeType):
            return marshal.loads, (marshal.dumps(value),)
        if isinstance(value, CellType):  # empty: functions send the contents of their cells, which may contain them
            return _new_cell, ()
        if isinstance(value, ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, staticmethod | classmethod):
            return type(value), (value.__func__,)
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, Tensor) and value.is_leaf and value.grad is not None:
            function, arguments, *state = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return _with_gradient, (value.grad, function, arguments), *state
        return NotImplemented


def _has_name(value: Any) -> bool:
    """Return whether pickle can send the name of a function or class."""
    if isinstance(value, type) and "<locals>" not in value.__qualname__:
        return True
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _module_of(value: Any) -> str:
    """Return the name of the module with the globals of a function; `functools.wraps` changes `__module__`."""
    name: str = value.__module__ if isinstance(value, type) else value.__globals__.get("__name__", "")
    is_here = isinstance(value, type) or vars(sys.modules.get(name, value)) is value.__globals__
    if name == "__main__" or not is_here:
        raise pickle.PicklingError(f"{value.__qualname__} is in no module that another process can import")
    return name


# The skeleton of a function or class is built before its contents, so that it may contain itself.


def _reduce_function(function: FunctionType) -> tuple[Any, ...]:
    cells = function.__closure__ or ()
    contents = [(cell, cell.cell_contents) for cell in cells if not _is_empty(cell)]
    attributes = {name: getattr(function, name) for name in ATTRIBUTES}
    skeleton = (_module_of(function), function.__code__, cells)
    return _new_function, skeleton, (contents, attributes, vars(function)), None, None, _fill_function


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _new_cell() -> CellType:
    return CellType()


def _new_function(module: str, code: CodeType, cells: tuple[CellType, ...]) -> FunctionType:
    return FunctionType(code, vars(importlib.import_module(module)), closure=cells)


def _fill_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    contents, attributes, others = state
    for cell, value in contents:
        cell.cell_contents = value
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(others)


def _reduce_class(kind: type) -> tuple[Any, ...]:
    attributes = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    names = {name: attributes.pop(name) for name in ("__module__", "__qualname__", "__slots__") if name in attributes}
    return _new_class, (type(kind), kind.__name__, kind.__bases__, names), attributes, None, None, _fill_class


def _new_class(metaclass: type, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> type:
    kind: type = metaclass(name, bases, names)
    return kind


def _fill_class(kind: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(kind, name, value)


def _with_gradient(gradient: Tensor, function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
    tensor = function(*arguments)
    tensor.grad = gradient
    return tensor
