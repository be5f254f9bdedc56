"""Modules that are named on the command line."""

import importlib
import traceback
from pathlib import Path
from types import ModuleType


def import_module(name: str) -> ModuleType:
    """Import a module; raises a ValueError if there is none with this name, or if its code fails."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name):
            raise ValueError(f"there is no module {error.name!r} to import from this folder") from None
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if _is_of(frame.filename, name)]
        where = f" in line {lines[-1]}" if lines else ""
        raise ValueError(
            f"importing {name} fails{where} with {type(error).__name__}: {error}. If it trains, put the model into a "
            'module that only defines it, or the training under if __name__ == "__main__"'
        ) from error


def _is_of(file: str, module: str) -> bool:
    """Return whether a file, maybe the `__init__.py` of a package, holds a module of this name."""
    path, name = Path(file), module.rpartition(".")[2]
    return path.stem == name or (path.stem == "__init__" and path.parent.name == name)
