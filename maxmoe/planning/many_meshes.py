"""`Sizes`: an integer with one value per mesh, so that one run of the planner plans many meshes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class MeshesDiffer(Exception):  # noqa: N818, not an error: it splits the meshes
    """Raised where the planner decides differently for different meshes.

    Attributes:
        mask: ``(N,)``, bool, decision for each mesh.
    """

    def __init__(self, mask: Tensor) -> None:
        super().__init__("the meshes differ")
        self.mask = mask


def _elementwise(name: str, neutral: int | None = None) -> Callable[["Sizes", Any], "Sizes"]:
    operator: Callable[[Tensor, Any], Tensor] = getattr(Tensor, name)

    def method(self: "Sizes", other: Any) -> "Sizes":
        if type(other) is int and other == neutral:
            return Sizes(self.values)
        return Sizes(operator(self.values, other.values if isinstance(other, Sizes) else other))

    return method


def _reflected(name: str) -> Callable[["Sizes", Any], "Sizes"]:
    operator: Callable[[Tensor, Any], Tensor] = getattr(Tensor, name)

    def method(self: "Sizes", other: Any) -> "Sizes":
        return Sizes(operator(self.values, other))

    return method


def _decision(name: str) -> Callable[["Sizes", Any], Any]:
    operator: Callable[[Tensor, Any], Tensor] = getattr(Tensor, name)

    def method(self: "Sizes", other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        if self.is_present and type(other) is int and other == 1:
            return name in ("__gt__", "__ge__", "__ne__")
        mask = operator(self.values, other.values if isinstance(other, Sizes) else other)
        number = int(mask.sum())
        if 0 < number < mask.numel():
            raise MeshesDiffer(mask)
        return number > 0

    return method


class Sizes(int):
    """One integer of a plan in many meshes, such as the sizes of an axis.

    Arithmetic is elementwise. A comparison must have the same result in all meshes; otherwise it raises `MeshesDiffer`,
    and the caller plans the two groups apart. As text, it is the value in the first mesh. A float on the left of
    a comparison or a product takes its own value as an int, which is zero: write the `Sizes` on the left.

    Args:
        values: ``(N,)``, int64, value in each mesh.
        is_present: whether an axis counts as larger than one in all meshes, also where its size is one. Its collectives
            then send no bytes there.
    """

    values: Tensor
    is_present: bool

    def __new__(cls, values: Tensor, *, is_present: bool = False) -> "Sizes":
        """Make an int whose own value is not used."""
        self = super().__new__(cls)
        self.values, self.is_present = values, is_present
        return self

    __add__ = __radd__ = _elementwise("__add__", 0)
    __sub__ = _elementwise("__sub__", 0)
    __floordiv__ = _elementwise("__floordiv__", 1)
    __mod__ = _elementwise("__mod__")
    __rsub__ = _reflected("__rsub__")
    __rfloordiv__ = _reflected("__rfloordiv__")
    __rmod__ = _reflected("__rmod__")
    __lt__ = _decision("__lt__")
    __le__ = _decision("__le__")
    __gt__ = _decision("__gt__")
    __ge__ = _decision("__ge__")
    __eq__ = _decision("__eq__")
    __ne__ = _decision("__ne__")
    __hash__ = int.__hash__

    def __mul__(self, other: Any) -> "Sizes":
        """Return the product, which is present if both factors are an axis or one."""
        if type(other) is int and other == 1:
            return self
        if isinstance(other, Sizes):
            return Sizes(self.values * other.values, is_present=self.is_present and other.is_present)
        return Sizes(self.values * other)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return str(int(self.values[0]))

    __str__ = __repr__

    def __format__(self, specification: str) -> str:
        """Format the value in the first mesh."""
        return format(int(self.values[0]), specification)

    def __bool__(self) -> bool:
        """Return whether the values are not zero."""
        return bool(self != 0)


def in_meshes(values: Tensor, *, is_present: bool = False) -> int:
    """Return the integer of a plan that has these values in the meshes: an ordinary int if it is the same in all."""
    first = int(values[0])
    is_same = bool((values == first).all())
    return first if is_same and (first > 1 or not is_present) else Sizes(values, is_present=is_present)


def in_each_mesh(values: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the values in each mesh, as ordinary integers; once if they are the same in all."""
    count = max((value.values.numel() for value in values if isinstance(value, Sizes)), default=1)
    columns = [value.values.tolist() if isinstance(value, Sizes) else [value] * count for value in values]
    return [*zip(*columns, strict=True)]


def as_tensor(value: int, count: int) -> Tensor:
    """Return an integer of a plan as a tensor ``(N,)`` of float64, one value for each of `count` meshes."""
    if isinstance(value, Sizes):
        return value.values.double()
    return torch.full((count,), float(value), dtype=torch.float64)
