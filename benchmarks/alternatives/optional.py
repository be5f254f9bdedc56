"""Checks for contenders that may not be installed."""

from importlib.util import find_spec

from benchmarks.machine import cpu_flags


def not_installed(*modules: str, install: str) -> str | None:
    """Return how to install a missing library, without importing anything."""
    missing = [module for module in modules if find_spec(module) is None]
    return f"not installed: pip install --no-deps {install}" if missing else None


def lacks_flags(*flags: str) -> str | None:
    """Return the instructions that the CPU lacks; loading the library would crash the process."""
    missing = [flag for flag in flags if flag not in cpu_flags()]
    return f"this CPU lacks {', '.join(missing)}" if missing else None
