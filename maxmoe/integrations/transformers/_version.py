"""Check of the transformers version, before anything is imported from it."""

import re
from importlib import metadata

TESTED = "transformers>=5.20,<6"  # as in pyproject.toml
OLDEST = (5, 20)  # the first version whose experts have attributes for everything that affects their computation


def check_version() -> None:
    """Raise an ImportError if transformers is missing or too old."""
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        installed = "none"
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:
        raise ImportError(
            f"maxmoe.integrations.transformers is tested with {TESTED}, got {installed}. Run: pip install '{TESTED}'"
        )


check_version()
