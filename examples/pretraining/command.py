"""Command line of the examples: types of options, the output folder, Ctrl-C, one-line error messages."""

import argparse
import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pretraining import InputError

LARGEST_INT = 2**31 - 1
LARGEST_DEPTH = 200  # layers: each takes time and memory even if it is small
LARGEST_SEED = 2**64 - 1


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of the description and shows defaults other than None and False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is False or action.default in (None, "")
        return action.help if says_nothing else super()._get_help_string(action)


def at_least(minimum: int, kind: type[int] | type[float] = int, at_most: float | None = None) -> Callable[[str], float]:
    """Return a function that converts an option to a number and checks its range."""
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
    """Create the output folder and check that files can be written there.

    Args:
        folder: output folder.
        files: names of files that will be written there.

    Raises:
        InputError: if the folder or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for path in (folder / name for name in files):
            if os.path.lexists(path) and not path.is_file():  # writing to a pipe would wait for a reader
                raise InputError(f"cannot write {path}: it is not a file")
    except OSError as error:
        raise InputError(f"cannot write to --out {folder}: {error.strerror}") from error


class StopRequest:
    """Context in which the first Ctrl-C or SIGTERM only sets `signal`; the second one acts as usual."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> "StopRequest":
        self.usual = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.usual.items():
            signal.signal(number, handler)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal."""
        self.signal = number
        signal.signal(number, self.usual[signal.Signals(number)])


def exit_status(name: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit status. Errors that the user can fix are printed as one line to stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may not be valid text
    try:
        status = run()
        sys.stdout.flush()
    except InputError as error:
        message, status = str(error), 1
    except MemoryError:
        message, status = "not enough memory", 1
    except OSError as error:  # also an error of stdout, if the disk is full or the reader of a pipe has ended
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
    except OSError:  # as above; otherwise Python flushes again at exit and prints the error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
