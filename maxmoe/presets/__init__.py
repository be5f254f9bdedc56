"""The configs of published model families; each is made in the file of its family in maxmoe/families."""

from maxmoe.checks.fields import nearest
from maxmoe.families.configs import from_transformers
from maxmoe.families.family import Preset, families

_PRESETS = {family.preset.__name__: family.preset for family in families().values()}
__all__ = ["from_transformers", *sorted(_PRESETS)]


def __getattr__(name: str) -> Preset:
    if name not in _PRESETS:
        raise AttributeError(f"maxmoe.presets has no {name!r}{nearest(name, __all__)}")
    return _PRESETS[name]


def __dir__() -> list[str]:
    return __all__
