"""Wrappers of PEFT around modules, and the connection to PEFT; importing this file does not import PEFT."""

import functools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from maxmoe.adapters.factors import takes

Part = TypeVar("Part", bound=nn.Module)


def connect_when_imported() -> None:
    """Connect to PEFT, as soon as it is imported: importing it would take as long as importing this library."""
    if "peft" in sys.modules:
        connect()
    else:
        sys.meta_path.insert(0, _FinderOfPeft())


class _FinderOfPeft(MetaPathFinder):
    """Finds PEFT as the other finders do, and connects to it after its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "peft":
            return None
        others = (each for each in sys.meta_path if each is not self and hasattr(each, "find_spec"))
        found = (each.find_spec(name, path, target) for each in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_connect(module: ModuleType) -> None:
                execute(module)
                connect()

            setattr(spec.loader, "exec_module", execute_and_connect)  # noqa: B010, mypy refuses the assignment
        return spec


@functools.cache
def connect() -> None:
    """Let the wrappers of PEFT hand their factors to experts instead of adding their product to the weights.

    If PEFT keeps adapters in another way than this library knows, it is left as it is, with a warning: PEFT
    computes the results, and each forward forms the sum of weights and adapters.
    """
    try:
        from maxmoe.adapters import _peft

        _peft.check_layout()
        _peft.replace_methods()
    except Exception as error:  # whatever another version of PEFT raises
        warnings.warn(
            "maxmoe does not know how this version of PEFT keeps adapters of experts "
            f"({type(error).__name__}: {error}): PEFT itself adds them to the weights, which takes about three times "
            "the time of frozen experts",
            stacklevel=2,
        )


def adapted_module(module: nn.Module) -> nn.Module:
    """Return the module that adapters of PEFT wrap, or the module itself if none do.

    With PEFT's `modules_to_save`, it is the copy that is active.
    """
    while True:
        copies = getattr(module, "modules_to_save", None)
        if copies is not None:
            active = [name for name in module.active_adapters if name in copies]  # type: ignore[union-attr]
            is_copy = active and not module.disable_adapters
            module = copies[active[0]] if is_copy else module.get_submodule("original_module")
        elif hasattr(module, "get_base_layer"):
            module = module.get_submodule("base_layer")
        else:
            return module


def without_adapters(module: nn.Module, kind: type[Part]) -> Part:
    """Return the `kind` in `module`: adapters of PEFT wrap it and do not forward its attributes."""
    if isinstance(module, kind):
        return module
    adapted = adapted_module(module)
    if not isinstance(adapted, kind):
        raise TypeError(
            f"the module must be {kind.__name__}, with or without adapters, got {type(adapted).__name__}: compile it "
            "in place with module.compile(), and recompute it with maxmoe.set_recompute"
        )
    return adapted


def wrappers_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the wrappers of PEFT in a module whose factors lie beside stacks of matrices, with their paths."""
    if "peft" not in sys.modules:
        return
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError:  # a PEFT that wraps no parameters
        return

    child: Any
    for path, child in module.named_modules():
        if isinstance(child, ParamWrapper) and child.get_param().dim() == 3:  # type: ignore[no-untyped-call]
            yield path, child


def unwrapped_name(path: str) -> str:
    """Return the path of the module inside a wrapper in the model that PEFT wraps, from the path of the wrapper."""
    path = path.removeprefix("base_model.model.")
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
    return path


def check_adapters(module: nn.Module, layer_type: type[nn.Module]) -> None:
    """Raise for adapters of other parts of layers than the experts, and of experts that do not take them."""
    wrappers = dict(wrappers_of(module))
    for path, wrapper in wrappers.items():
        experts, parameter = wrapper.get_base_layer(), wrapper.parameter_name
        if not takes(experts, parameter):
            raise ValueError(
                f"{path} must adapt experts that take low-rank factors, got {type(experts).__name__}.{parameter}: in "
                'models of transformers, call set_experts_implementation("maxmoe")'
            )
    beside_experts = set(wrappers.values())
    for path, layer in module.named_modules():
        for name, part in layer.named_children() if isinstance(layer, layer_type) else ():
            while part in beside_experts:
                part = part.get_submodule("base_layer")
            if hasattr(part, "base_layer"):
                raise ValueError(
                    f"{path}.{name}".lstrip(".") + f" must have no adapters around it, got {type(part).__name__}: "
                    "merge them before parallelize (PEFT: merge_and_unload); adapters of the experts' matrices may stay"
                )


def adapters_around(name: str, parameters: Mapping[str, object]) -> str:
    """Return the end of a message for a parameter of a module that PEFT has wrapped or copied."""
    module, _, parameter = name.rpartition(".")
    is_inside = any(f"{module}.{each}.{parameter}" in parameters for each in ("base_layer", "original_module"))
    reason = f": {module} has adapters around it, or is in modules_to_save: merge them before parallelize"
    return reason if is_inside else ""
