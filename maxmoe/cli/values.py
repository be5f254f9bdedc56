"""Values of the command line: numbers and modules."""

import argparse
import importlib
import re
import traceback
from pathlib import Path
from types import ModuleType


def positive(text: str) -> int:
    """Parse a positive integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def positives(text: str) -> list[int]:
    """Parse comma-separated positive integers."""
    return [positive(number) for number in text.split(",")]


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, such as 80GiB or 80GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B|B?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 80GiB, got {text!r}")
    power = "KMGT".index(match[2]) + 1 if match[2] else 0
    number = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least one byte, got {text!r}")
    return number


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
