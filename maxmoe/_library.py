"""Loads the C++ core: importing this module registers the operators `torch.ops.maxmoe.*`."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from maxmoe._C import BuildInfo

_PACKAGE = Path(__file__).parent
_BUILD = "pip install --no-build-isolation -e ."


def _check_build() -> None:
    """Raise unless the core is built for the minor version of the running torch; with any other it may crash."""
    recorded = _PACKAGE / "_torch_version.txt"
    if not recorded.exists():
        raise ImportError(
            f"the C++ core of maxmoe is not built in {_PACKAGE}. In the folder of its setup.py run: {_BUILD}"
        )
    built, running = recorded.read_text().strip(), torch.__version__
    if built.split(".")[:2] != running.split(".")[:2]:
        fix = f"take the torch that it was built against: pip install torch=={built.split('+')[0]}"
        if (_PACKAGE.parent / "setup.py").exists():  # not a wheel
            fix = f"build it again in {_PACKAGE.parent}: {_BUILD} (or {fix})"
        raise ImportError(f"maxmoe was built against torch {built}, but torch {running} is running. To fix it, {fix}")


_check_build()

from maxmoe import _C  # noqa: E402


def build_info() -> "BuildInfo":
    """Return the versions of maxmoe, torch, compiler and Eigen, and the instruction sets and cache of this machine.

    "isa" is the instruction set in use, "supported_isas" are all that the machine supports.
    """
    return _C.build_info()
