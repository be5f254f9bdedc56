"""Low-rank factors of a module, for the time of a call."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from maxmoe.ops import LowRankFactors

_ATTRIBUTE = "low_rank_factors"


class _HandedOver:
    """Factors, and whether the forward of the module has asked for them."""

    def __init__(self, factors: LowRankFactors) -> None:
        self.factors = factors
        self.is_taken = False


@contextmanager
def hand_over(module: nn.Module, parameter: str, factors: LowRankFactors) -> Iterator[None]:
    """Give a module the factors beside one of its parameters while the block runs.

    Raises:
        RuntimeError: if the module has not asked for them, so that its output lacks the adapter.
    """
    outer = module.__dict__.get(_ATTRIBUTE, {})
    handed_over = _HandedOver(factors)
    module.__dict__[_ATTRIBUTE] = {**outer, parameter: handed_over}
    try:
        yield
    finally:
        module.__dict__[_ATTRIBUTE] = outer
    if not handed_over.is_taken:
        raise RuntimeError(
            f"the forward of {type(module).__name__} has computed without the adapter beside {parameter}: it must read "
            "maxmoe.adapters.factors_of, as that of maxmoe.nn.Experts does"
        )


def factors_of(module: nn.Module, parameter: str, *, transposed: bool = False) -> LowRankFactors | None:
    """Return the factors beside a parameter in this call, or None.

    Args:
        module: module whose forward runs.
        parameter: name of a parameter ``(L, in, out)``, or ``(L, out, in)`` if it is transposed.
        transposed: whether the module computes with the transposed matrices.
    """
    handed_over: _HandedOver | None = module.__dict__.get(_ATTRIBUTE, {}).get(parameter)
    if handed_over is None:
        return None
    handed_over.is_taken = True
    return handed_over.factors.transposed() if transposed else handed_over.factors
