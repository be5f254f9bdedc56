"""Files that replace others."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Context in which a new file is written, which takes the place of the file at `path` at the end.

    If the context raises, or the process ends, the file at `path` is as it was before. A link stays a link.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():  # a pipe or a device, which is written to
        yield target
        return
    new = target.with_name(f"{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        yield new
        if target.exists():
            shutil.copymode(target, new)
        _write_through(new)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def _write_through(path: Path) -> None:
    """Wait until a file is on its disk. Otherwise, after a power failure, its name may lead to an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
