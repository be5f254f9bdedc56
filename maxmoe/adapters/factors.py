"""Low-rank factors of a module, for the time of a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from maxmoe._torch.this_thread import OfThisThread
from maxmoe.declaration import expert_matrices
from maxmoe.ops import LowRankFactors
from maxmoe.quantization import QuantizedStack
from maxmoe.quantization.formats import DTYPES


@dataclass(eq=False)
class _HandedOver:
    """Factors of a module, and whether its forward has asked for them."""

    module: nn.Module
    factors: LowRankFactors
    is_taken: bool = False


# By the name of the parameter. If an adapted module calls another one, the factors of the inner module.
_handed_over: OfThisThread[dict[str, _HandedOver]] = OfThisThread("factors of adapters")


def takes(module: nn.Module, parameter: str) -> bool:
    """Return whether a module takes factors beside a parameter; not beside one of 8 bits or with a parametrization."""
    own: dict[str, object] = {**dict(module.named_children()), **dict(module.named_parameters(recurse=False))}
    matrices = own.get(parameter)
    return (
        isinstance(matrices, Tensor | QuantizedStack)
        and matrices.dim() == 3
        and matrices.dtype in DTYPES
        and parameter in expert_matrices(module)
    )


@contextmanager
def hand_over(module: nn.Module, parameter: str, factors: LowRankFactors) -> Iterator[None]:
    """Give a module the factors beside one of its parameters, in the calls of this thread while the block runs."""
    handed_over = _HandedOver(module, factors)
    with _handed_over.set({**(_handed_over.read(module, parameter) or {}), parameter: handed_over}):
        yield
    if not handed_over.is_taken:
        raise RuntimeError(
            f"the forward of {type(module).__name__} has computed without the adapter beside {parameter}: it must read "
            "maxmoe.adapters.factors_of, as the forward of maxmoe.nn.Experts does"
        )


def factors_of(module: nn.Module, parameter: str, *, transposed: bool = False) -> LowRankFactors | None:
    """Return the factors beside a parameter in this call, or None.

    Args:
        module: module whose forward runs.
        parameter: name of a parameter ``(L, in, out)``, or ``(L, out, in)`` if it is transposed.
        transposed: whether the module computes with the transposed matrices.
    """
    handed_over = (_handed_over.read(module) or {}).get(parameter)
    if handed_over is None or handed_over.module is not module:
        return None
    handed_over.is_taken = True
    return handed_over.factors.transposed() if transposed else handed_over.factors
