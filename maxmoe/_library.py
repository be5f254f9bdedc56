"""Loads the C++ core: importing this module registers the operators `torch.ops.maxmoe.*`.

The core is one extension module for each minor release of torch that it was built for, such as
`_C_torch2_13.cpython-311-x86_64-linux-gnu.so`. The one of the running torch becomes `maxmoe._C`.
"""

import os
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from maxmoe import _C
    from maxmoe._C import BuildInfo

_PACKAGE = Path(__file__).parent
_BUILD = "pip install --no-build-isolation -e ."


def _built_cores() -> dict[tuple[int, int], Path]:
    """Return the extension modules for this Python, by the minor release of torch."""
    pattern = re.compile(r"_C_torch(\d+)_(\d+)" + re.escape(EXTENSION_SUFFIXES[0]))
    matches = ((pattern.fullmatch(path.name), path) for path in _PACKAGE.glob("_C_torch*"))
    return {(int(match[1]), int(match[2])): path for match, path in matches if match}


def _fitting_core() -> Path:
    """Return the extension module for the running torch; raise if there is none: another one would crash."""
    if os.environ.get("MAXMOE_CORE") == "off":
        raise ImportError("layers and operators of maxmoe need its C++ core, got MAXMOE_CORE=off in the environment")
    cores = _built_cores()
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) in cores:
        return cores[major, minor]
    is_wheel = not (_PACKAGE.parent / "setup.py").exists()
    sources = "a clone of https://github.com/maxmoe/maxmoe" if is_wheel else str(_PACKAGE.parent)
    if not cores:
        raise ImportError(f"the C++ core of maxmoe is not built in {_PACKAGE}. In {sources} run: {_BUILD}")
    built = [f"{first}.{second}" for first, second in sorted(cores)]
    raise ImportError(
        f"maxmoe was built for torch {', '.join(built)}, but torch {torch.__version__} is running. Build it for this "
        f"torch, in {sources}: {_BUILD} (or take a torch that it was built for: pip install 'torch=={built[-1]}.*')"
    )


def _load_core() -> ModuleType:
    """Import the extension module for the running torch as `maxmoe._C`, and return it."""
    spec = spec_from_file_location("maxmoe._C", _fitting_core())
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    return module


if not TYPE_CHECKING:
    _C = _load_core()


def build_info() -> "BuildInfo":
    """Return the versions of maxmoe, torch, compiler and Eigen, and the instruction sets and cache of this machine.

    "isa" is the instruction set in use, "supported_isas" are all that the machine supports.
    """
    return _C.build_info()
