"""Connection to PEFT: its wrappers hand their factors to experts instead of adding their product to the weights."""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from maxmoe.adapters.factors import hand_over
from maxmoe.declaration import expert_matrices
from maxmoe.ops import LowRankFactors
from maxmoe.quantization import QuantizedStack

Part = TypeVar("Part", bound=nn.Module)

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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


def connect_if_imported() -> None:
    """Connect if PEFT has been imported; importing it would take as long as importing this library."""
    if "peft" in sys.modules:
        connect()


def connect_if_installed() -> None:
    """Import PEFT if it is installed, and connect."""
    if find_spec("peft") is not None:
        connect()


@functools.cache
def connect() -> None:
    """Connect to PEFT, once per process.

    If PEFT keeps adapters in another way than this library knows, it is left as it is, with a warning: results are
    those of PEFT, and each forward forms the sum of weights and adapters.
    """
    from maxmoe.adapters import _peft

    try:
        _peft.check_layout()
        _peft.show_quantized_weights()
        _peft.replace_activation(_or_hand_over)
    except Exception as error:  # whatever another version of PEFT raises
        warnings.warn(
            "maxmoe does not know how this version of PEFT keeps adapters of experts "
            f"({type(error).__name__}: {error}): PEFT itself adds them to the weights, which takes about three times "
            "the time of frozen experts",
            stacklevel=2,
        )


def _or_hand_over(activate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that hands the factors over to a module that takes them, or else calls `activate`."""
    from maxmoe.adapters import _peft

    @functools.wraps(activate)
    @contextmanager
    def activated(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
        adapters = [adapter for adapter in active_adapters if adapter in wrapper.lora_A]
        module, name = wrapper.get_base_layer(), wrapper.parameter_name
        with ExitStack() as stack:
            if adapters and takes(module, name):
                factors = [_peft.factors_of_adapter(wrapper, adapter) for adapter in adapters]
                stack.enter_context(hand_over(module, name, LowRankFactors.side_by_side(factors)))
            else:
                stack.enter_context(activate(wrapper, active_adapters))
            yield

    return activated


def takes(module: nn.Module, parameter: str) -> bool:
    """Return whether a module takes factors beside a parameter; not beside one of 8 bits or with a parametrization."""
    own: dict[str, object] = {**dict(module.named_children()), **dict(module.named_parameters(recurse=False))}
    matrices = own.get(parameter)
    return (
        isinstance(matrices, Tensor | QuantizedStack)
        and matrices.dim() == 3
        and matrices.dtype in _DTYPES
        and parameter in expert_matrices(module)
    )
