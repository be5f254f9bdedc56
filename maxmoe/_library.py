"""Loads the C++ core: importing this module registers the operators `torch.ops.maxmoe.*`.

The core is one library for each minor release of torch that it was built for, such as `libmaxmoe_torch2_13.so`. It is
not linked to Python: its few functions beside the operators are C functions, called through `ctypes`.
"""

import ctypes
import json
import os
import re
from pathlib import Path
from typing import Any, cast

import torch

_PACKAGE = Path(__file__).parent
_BUILD = "pip install --no-build-isolation -e ."


def _built_cores() -> dict[tuple[int, int], Path]:
    """Return the libraries by the minor release of torch."""
    matches = ((re.fullmatch(r"libmaxmoe_torch(\d+)_(\d+)\.so", path.name), path) for path in _PACKAGE.iterdir())
    return {(int(match[1]), int(match[2])): path for match, path in matches if match}


def _missing(message: str) -> ImportError:
    """Make the error of a core that is off, not built, or cannot be loaded; its name is the name of this module."""
    return ImportError(message, name="maxmoe._library")


def _fitting_core() -> Path:
    """Return the library for the running torch; raise if there is none: another one would crash."""
    if os.environ.get("MAXMOE_CORE") == "off":
        raise _missing("layers and operators of maxmoe need its C++ core, got MAXMOE_CORE=off in the environment")
    cores = _built_cores()
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) in cores:
        return cores[major, minor]
    is_wheel = not (_PACKAGE.parent / "setup.py").exists()
    sources = "the folder of its sources" if is_wheel else str(_PACKAGE.parent)
    if not cores:
        raise _missing(
            f"layers and operators of maxmoe need its C++ core, which is not built in {_PACKAGE}, as after an "
            f"installation with MAXMOE_CORE=off. In {sources} run: {_BUILD}"
        )
    built = [f"{first}.{second}" for first, second in sorted(cores)]
    raise _missing(
        f"maxmoe was built for torch {', '.join(built)}, but torch {torch.__version__} is running. Build it for this "
        f"torch, in {sources}: {_BUILD} (or take a torch that it was built for: pip install 'torch=={built[-1]}.*')"
    )


def _load_core() -> ctypes.CDLL:
    """Load the library for the running torch, and return it with the types of its functions."""
    path = _fitting_core()
    try:
        core = ctypes.CDLL(str(path))
    except OSError as error:
        raise _missing(f"the C++ core of maxmoe cannot be loaded: {error}") from error
    core.maxmoe_error.restype = core.maxmoe_build_info.restype = ctypes.c_char_p
    core.maxmoe_force_path.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p)]
    core.maxmoe_force_path.restype = ctypes.c_char_p
    core.maxmoe_empty_cache.restype = None
    core.maxmoe_memory_allocated.restype = core.maxmoe_memory_reserved.restype = ctypes.c_size_t
    if message := core.maxmoe_error().decode():
        raise _missing(message)
    return core


_core = _load_core()


def build_info() -> dict[str, Any]:
    """Return the versions of maxmoe, torch, compiler and Eigen, and the instruction sets and cache of this machine.

    See `maxmoe.build_info`, which answers without the core too.
    """
    return {"core": str(_fitting_core())} | cast(dict[str, Any], json.loads(_core.maxmoe_build_info()))


def force_path(name: str) -> str:
    """Make operators run "kernels", "cuda_emulator" or "aten" for tensors on the CPU; return what they ran before."""
    error = ctypes.c_char_p()
    before = _core.maxmoe_force_path(name.encode(), ctypes.byref(error))
    if before is None:
        raise RuntimeError((error.value or b"").decode())
    return cast(bytes, before).decode()


def empty_cache() -> None:
    """Return cached memory of the operators to the system, as `torch.cuda.empty_cache` does for a GPU.

    On Linux, freed CPU memory of results and work space of at least 4 MiB is cached for later calls. The cache is never
    larger than the peak use, and the system can reclaim it when it needs memory (`MADV_FREE`), so that it only shows in
    the resident memory of the process. On other systems, nothing is cached.
    """
    _core.maxmoe_empty_cache()


def memory_allocated() -> int:
    """Return the bytes in use by results and work space of operators."""
    return cast(int, _core.maxmoe_memory_allocated())


def memory_reserved() -> int:
    """Return the bytes in use and the bytes of freed pages that are kept."""
    return cast(int, _core.maxmoe_memory_reserved())
