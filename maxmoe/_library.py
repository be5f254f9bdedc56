"""Loads the C++ core: importing this module registers the operators `torch.ops.maxmoe.*`."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from maxmoe._C import BuildInfo

_PACKAGE = Path(__file__).parent
_BUILD = "pip install --no-build-isolation -e ."


def _check_build() -> None:
    """Raise unless the core exists and is made for the running torch: another crashes at some point."""
    recorded = _PACKAGE / "_torch_version.txt"
    if not recorded.exists():
        raise ImportError(
            f"the C++ core of maxmoe is not built in {_PACKAGE}. In the folder of its setup.py run: {_BUILD}"
        )
    built, running = recorded.read_text().strip(), torch.__version__
    if built.split(".")[:2] != running.split(".")[:2]:
        mended = f"take the torch that it was built against: pip install torch=={built.split('+')[0]}"
        if (_PACKAGE.parent / "setup.py").exists():  # not a wheel
            mended = f"build it again in {_PACKAGE.parent}: {_BUILD} (or {mended})"
        raise ImportError(
            f"maxmoe was built against torch {built}, but torch {running} is running. To mend it, {mended}"
        )


_check_build()

from maxmoe import _C  # noqa: E402


def build_info() -> "BuildInfo":
    """Describe the build and this machine.

    Returns:
        The versions of maxmoe, torch, compiler and Eigen; the instruction sets that this machine supports, "isa" the
        one in use; the size of its second-level cache.
    """
    return _C.build_info()
