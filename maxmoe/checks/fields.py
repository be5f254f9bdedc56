"""Checks of the fields of configs, and of names that users write."""

import difflib
import functools
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

FLOAT32_MAX = 2.0**128 - 2.0**104

Config = TypeVar("Config")


def refuse_unknown_fields(cls: type[Config], moved: Mapping[str, tuple[object, str]] | None = None) -> type[Config]:
    """Decorate a dataclass so that an unknown keyword raises a TypeError with the most similar fields.

    `moved` has fields of earlier versions: their value without effect, which is left out, so that saved configs are
    read, and how another value is given now, for the message of a ValueError.
    """
    initialize, names = cls.__init__, inspect.signature(cls).parameters
    earlier = moved or {}

    @functools.wraps(initialize)
    def checked(self: Config, *args: object, **values: object) -> None:
        for name in [*values]:
            if name in earlier:
                (without_effect, now), value = earlier[name], values.pop(name)
                if value != without_effect:
                    raise ValueError(f"{cls.__name__} has no field {name!r} ({value!r}) any more: give {now}")
            elif name not in names:
                raise TypeError(f"{cls.__name__} has no field {name!r}{nearest(name, names)}")
        initialize(self, *args, **values)

    setattr(cls, "__init__", checked)  # noqa: B010, mypy refuses the assignment
    return cls


def check_int(name: str, value: object, *, at_least: int) -> None:
    """Raise unless `value` is an int, not a bool, in [at_least, 2^31)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        kind = "a positive int" if at_least == 1 else f"an int >= {at_least}"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    if value >= 2**31:
        raise ValueError(f"{name} must be an int below 2^31, got {value}")


def check_number(name: str, value: object, *, above: float = -math.inf, at_least: float = -math.inf) -> None:
    """Raise unless `value` is an int or float that is finite in float32 and within the bounds."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (number > above and at_least <= number <= FLOAT32_MAX):
        bound = f"> {above}" if above > at_least else f">= {at_least}"
        raise ValueError(f"{name} must be a finite float {bound}, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message that lists the known names most similar to `name`, or all of them."""
    known = sorted(set(known))
    alike = difflib.get_close_matches(name, known, n=3)
    if alike:
        return f"; the nearest are {', '.join(map(repr, alike))}"
    return f"; there are {', '.join(map(repr, known)) or 'none'}"
