"""Named tuples whose last fields are computed when one of them is first read."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=tuple[Any, ...])


class Deferred(tuple[Any, ...]):
    """Base of the types that `deferred` makes.

    What makes another tuple of all fields, such as pickle or a pytree, makes an ordinary one.
    """

    _kind: type[Any]
    _known: tuple[Any, ...]
    _compute: Callable[[], Iterable[Any]] | None

    def __new__(cls, *fields: Any) -> Any:
        """Return an ordinary tuple of the fields."""
        return cls._kind(*fields)

    @classmethod
    def _make(cls, fields: Iterable[Any]) -> Any:
        return cls._kind._make(fields)

    def _replace(self, **changes: Any) -> Any:
        known = dict(zip(self._kind._fields, self._known, strict=False))
        if changes.keys() <= known.keys():
            return deferred(self._kind, *(known | changes).values(), compute=lambda: self._all()[len(known) :])
        return self._all()._replace(**changes)

    def _all(self) -> Any:
        if self._compute is not None:
            self._known, self._compute = (*self._known, *self._compute()), None
        return self._kind._make(self._known)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def __getitem__(self, index: Any) -> Any:
        return self._known[index] if index in range(len(self._known)) else self._all()[index]

    def __contains__(self, value: object) -> bool:
        return value in self._all()

    def __add__(self, other: Any) -> Any:
        return self._all() + other

    def __eq__(self, other: object) -> bool:
        return bool(self._all() == other)

    def __ne__(self, other: object) -> bool:
        return bool(self._all() != other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __reduce__(self) -> Any:
        return self._kind, tuple(self)

    def __repr__(self) -> str:
        return repr(self._all())


def deferred(kind: type[T], *known: Any, compute: Callable[[], Iterable[Any]]) -> T:
    """Return a named tuple whose last fields are computed when one of them is first read, or all are unpacked.

    Args:
        kind: type of the named tuple, of which the result is an instance.
        *known: first fields.
        compute: function that returns the other fields. It is called at most once.
    """
    result = tuple.__new__(_deferred_type(kind), (None,) * len(kind._fields))  # type: ignore[attr-defined]
    result._known, result._compute = known, compute
    return cast(T, result)


@functools.cache
def _deferred_type(kind: type[Any]) -> type[Any]:
    def field(index: int) -> property:
        def read(self: Any) -> Any:
            return self._known[index] if index < len(self._known) else self._all()[index]

        return property(read)

    fields = {name: field(index) for index, name in enumerate(kind._fields)}
    return type(kind.__name__, (Deferred, kind), {"__module__": kind.__module__, "_kind": kind, **fields})


def joined(kind: type[T], *first: Any, rest: tuple[Any, ...]) -> T:
    """Return the named tuple of some fields and those of another tuple, which stay deferred if they are."""
    if isinstance(rest, Deferred):
        return deferred(kind, *first, compute=lambda: rest)
    return kind(*first, *rest)
