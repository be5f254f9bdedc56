"""Modules that are named on the command line."""

import importlib
from types import ModuleType


def import_module(name: str) -> ModuleType:
    """Import a module; raises a ValueError if there is none with this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise ValueError(f"there is no module {error.name!r} to import from this folder") from None
        raise
