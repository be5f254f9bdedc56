"""What the command lines of the examples have in common: their options, and an end in one line."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pretraining import InputError

LARGEST_INT = 2**31 - 1
LARGEST_DEPTH = 200  # layers, each of which takes time and memory whatever its size
LARGEST_SEED = 2**64 - 1


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of the description and adds every default but None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def at_least(minimum: int, kind: type[int] | type[float] = int, at_most: float | None = None) -> Callable[[str], float]:
    """Make the conversion of an option that is a number."""
    maximum = at_most or {int: LARGEST_INT, float: sys.float_info.max}[kind]

    def convert(text: str) -> float:
        value = kind(text)
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {text}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum}, got {text}")
        return value

    convert.__name__ = kind.__name__  # argparse says "invalid int value"
    return convert


def prepare_output(folder: Path, *files: str) -> None:
    """Make the folder and try it before the work begins.

    Args:
        folder: of the results.
        files: names that will be written in it.

    Raises:
        InputError: if that will not do.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for path in (folder / name for name in files):
            if os.path.lexists(path) and not path.is_file():  # writing to a pipe would wait for a reader
                raise InputError(f"cannot write {path}: it is not a file")
    except OSError as error:
        raise InputError(f"cannot write to --out {folder}: {error.strerror}") from error


def exit_status(name: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit status; what the user can mend is one line on the standard error."""
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        status = run()
        sys.stdout.flush()
    except InputError as error:
        message, status = str(error), 1
    except MemoryError:
        message, status = "not enough memory", 1
    except OSError as error:  # that of the standard output, too: a full disk, or a pipe that nobody reads
        message, status = str(error), 1
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        message, status = "not enough memory", 1
    except KeyboardInterrupt:
        message, status = "interrupted", 128 + signal.SIGINT
    else:
        return status
    print(f"{name}: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # as above; Python would flush once more, and say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
