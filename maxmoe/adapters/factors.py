"""Low-rank factors of a module, for the time of a call."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from maxmoe.ops import LowRankFactors

_ATTRIBUTE = "low_rank_factors"


@contextmanager
def hand_over(module: nn.Module, parameter: str, factors: LowRankFactors) -> Iterator[None]:
    """Give a module the factors beside one of its parameters while the block runs."""
    outer = module.__dict__.get(_ATTRIBUTE, {})
    module.__dict__[_ATTRIBUTE] = {**outer, parameter: factors}
    try:
        yield
    finally:
        module.__dict__[_ATTRIBUTE] = outer


def factors_of(module: nn.Module, parameter: str, *, transposed: bool = False) -> LowRankFactors | None:
    """Return the factors beside a parameter in this call, or None.

    Args:
        module: module whose forward runs.
        parameter: name of a parameter ``(L, in, out)``, or ``(L, out, in)`` if it is transposed.
        transposed: whether the module computes with the transposed matrices.
    """
    factors: LowRankFactors | None = module.__dict__.get(_ATTRIBUTE, {}).get(parameter)
    return factors if factors is None or not transposed else factors.transposed()
