"""Modules that are named on the command line."""

import importlib
from types import ModuleType


def import_module(name: str) -> ModuleType:
    """Import a module; raises a ValueError if there is none with this name, or if its code fails."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name):
            raise ValueError(f"there is no module {error.name!r} to import from this folder") from None
        raise ValueError(
            f"importing {name} fails with {type(error).__name__}: {error}. If it trains, put the model into a module "
            'that only defines it, or the training under if __name__ == "__main__"'
        ) from error
