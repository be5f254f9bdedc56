"""Parameters that take the place of others while a function of a module runs."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol, TypeVar

from torch import nn

from maxmoe._torch_copies import copy_modules

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class ReplacedParameters(Protocol):
    """Parameters of a module that others have replaced."""

    def restore(self) -> None:
        """Put the parameters back."""
        ...

    def finish(self) -> None:
        """Mark the parameters as replaced for good."""
        ...


def while_replaced(
    replace: Callable[[nn.Module], Sequence[ReplacedParameters]], *, kept: bool
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function of a module: while it runs, parameters are replaced, and afterwards if they are `kept`.

    If the function raises, the parameters are as before.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        name = next(iter(inspect.signature(function).parameters))

        @functools.wraps(function)
        def decorated(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
            module = arguments[0] if arguments else options.get(name)
            replacements = replace(module) if isinstance(module, nn.Module) else ()
            is_kept = False
            try:
                result = function(*arguments, **options)
                is_kept = kept
            finally:
                for each in replacements:
                    each.finish() if is_kept else each.restore()
            return result

        return decorated

    return decorate


def on_a_copy(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function of a module that changes it: it gets a copy that shares the tensors.

    The module itself does not change, so that other threads can call it meanwhile.
    """
    name = next(iter(inspect.signature(function).parameters))
    call: Callable[..., Result] = function

    @functools.wraps(function)
    def decorated(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        if arguments and isinstance(arguments[0], nn.Module):
            return call(copy_modules(arguments[0]), *arguments[1:], **options)
        module = options.get(name)
        copied = {name: copy_modules(module)} if isinstance(module, nn.Module) else {}
        return call(*arguments, **options | copied)

    return decorated
