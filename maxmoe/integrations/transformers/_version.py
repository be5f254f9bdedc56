"""Refuses a transformers that is too old, before anything is imported from it."""

import re
from importlib import metadata

TESTED = "transformers>=5.20,<6"  # as in pyproject.toml
OLDEST = (5, 20)  # the first whose experts say all that decides how to compute them


def check_version() -> None:
    """Compare the installed version with the tested ones.

    Raises:
        ImportError: if transformers is missing or too old, naming both versions.
    """
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        installed = None
    if installed is None or tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:
        got = "no transformers" if installed is None else f"transformers {installed}"
        raise ImportError(
            f"maxmoe.integrations.transformers is tested with {TESTED}, got {got}. Run: pip install '{TESTED}'"
        )


check_version()
