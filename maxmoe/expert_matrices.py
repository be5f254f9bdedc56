"""The stacks of matrices that the forward of a module gives to the operators, with low-rank factors beside them.

They may be quantized (`maxmoe.quantize_experts`) and adapted (`maxmoe.adapters`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Finder = Callable[[nn.Module], Mapping[str, bool]]

# For modules of other libraries.
_finders: list[Finder] = []


def finds_expert_matrices(finder: Finder) -> None:
    """Register a function that answers `expert_matrices` for modules of another library.

    Args:
        finder: function of a module; returns nothing for modules that it does not know.
    """
    _finders.append(finder)


def expert_matrices(module: Any) -> Mapping[str, bool]:
    """Return the stacks of a module by their names, and whether they are ``(L, in, out)``, else ``(L, out, in)``.

    A module of this library has a method `expert_matrices`.
    """
    if hasattr(type(module), "expert_matrices"):  # of the type: PEFT's wrappers have the attributes of what they wrap
        found: Mapping[str, bool] = module.expert_matrices()
        return found
    return next((matrices for finder in _finders if (matrices := finder(module))), {})
