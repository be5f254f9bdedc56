"""Named tuples whose fields are computed when one of them is first read."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=tuple[Any, ...])


class Deferred(tuple[Any, ...]):
    """Base of the types that `deferred` makes.

    What makes another tuple of the fields, such as `_replace`, pickle or a pytree, makes an ordinary one. Code in C
    that reads the fields of a tuple directly finds None.
    """

    _kind: type[Any]
    _compute: Callable[[], Any]
    _result: Any = None

    def __new__(cls, *fields: Any) -> Any:
        """Return an ordinary tuple of the fields."""
        return cls._kind(*fields)

    @classmethod
    def _make(cls, fields: Iterable[Any]) -> Any:
        return cls._kind._make(fields)

    @property
    def _ordinary(self) -> Any:
        if self._result is None:
            self._result = self._compute()
        return self._result

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ordinary)

    def __getitem__(self, index: Any) -> Any:
        return self._ordinary[index]

    def __contains__(self, value: object) -> bool:
        return value in self._ordinary

    def __add__(self, other: Any) -> Any:
        return self._ordinary + other

    def __eq__(self, other: object) -> bool:
        return bool(self._ordinary == other)

    def __ne__(self, other: object) -> bool:
        return bool(self._ordinary != other)

    def __hash__(self) -> int:
        return hash(self._ordinary)

    def __reduce__(self) -> Any:
        return self._kind, tuple(self)

    def __repr__(self) -> str:
        return repr(self._ordinary)


def deferred(kind: type[T], compute: Callable[[], T]) -> T:
    """Return a named tuple whose fields are computed when one of them is first read.

    Args:
        kind: type of the named tuple, of which the result is an instance.
        compute: function that returns the tuple. It is called at most once.
    """
    result = tuple.__new__(_deferred_type(kind), (None,) * len(kind._fields))  # type: ignore[attr-defined]
    result._compute = compute
    return cast(T, result)


@functools.cache
def _deferred_type(kind: type[Any]) -> type[Any]:
    def field(name: str) -> property:
        return property(lambda self: getattr(self._ordinary, name))

    fields = {name: field(name) for name in kind._fields}
    return type(kind.__name__, (Deferred, kind), {"__module__": kind.__module__, "_kind": kind, **fields})
