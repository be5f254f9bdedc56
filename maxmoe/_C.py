"""Loads the C++ core, which takes the place of this module: ``import maxmoe._C``.

There is a module for each minor release of torch and each Python that the package was built for, such as
``torch2.13/_C.cpython-311-x86_64-linux-gnu.so``, and a library for each release of torch, which registers the operators
``torch.ops.maxmoe.*``. Another torch or another Python would crash them.
"""

import os
import re
import sys
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from sysconfig import get_config_var
from types import ModuleType


def _missing(message: str) -> ImportError:
    """Make the error of a core that is off, not built, or cannot be loaded; its name is the name of this module."""
    return ImportError(message, name="maxmoe._C")


def _refuse_sub_interpreters() -> None:
    """Raise in a sub-interpreter, before torch is imported, whose import does not return there."""
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    if find_spec(name) is None:
        return
    interpreters = import_module(name)
    if interpreters.get_current() != interpreters.get_main():
        raise _missing("maxmoe cannot be imported in a sub-interpreter, because torch cannot")


_refuse_sub_interpreters()

import torch  # noqa: E402

_PACKAGE = Path(__file__).parent
_BUILD = "pip install --no-build-isolation -e ."


def _built_modules() -> dict[tuple[int, int], dict[str, Path]]:
    """Return the modules by the minor release of torch and the suffix of the Python."""
    modules: dict[tuple[int, int], dict[str, Path]] = {}
    for path in sorted(_PACKAGE.glob("torch*.*/_C.*.so")):
        major, minor = map(int, path.parent.name.removeprefix("torch").split("."))
        modules.setdefault((major, minor), {})[path.name.removeprefix("_C")] = path
    return modules


def _fitting_module() -> Path:
    """Return the module for the running torch and Python; raise if there is none."""
    if os.environ.get("MAXMOE_CORE") == "off":
        raise _missing("layers and operators of maxmoe need its C++ core, got MAXMOE_CORE=off in the environment")
    modules = _built_modules()
    is_wheel = not (_PACKAGE.parent / "setup.py").exists()
    sources = "the folder of its sources" if is_wheel else str(_PACKAGE.parent)
    if not modules:
        raise _missing(
            f"layers and operators of maxmoe need its C++ core, which is not built in {_PACKAGE}, as after an "
            f"installation with MAXMOE_CORE=off. In {sources} run: {_BUILD}"
        )
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) not in modules:
        built = [f"{first}.{second}" for first, second in sorted(modules)]
        raise _missing(
            f"maxmoe was built for torch {', '.join(built)}, but torch {torch.__version__} is running. Build it for "
            f"this torch, in {sources}: {_BUILD} (or take a torch that it was built for: "
            f"pip install 'torch=={built[-1]}.*')"
        )
    of_torch, suffix = modules[major, minor], get_config_var("EXT_SUFFIX")
    if suffix not in of_torch:
        pythons = ", ".join(_python_of(name) for name in of_torch)
        raise _missing(
            f"maxmoe was built for {pythons}, but {_python_of(suffix)} is running. Build it for this Python, in "
            f"{sources}: {_BUILD}"
        )
    return of_torch[suffix]


def _python_of(suffix: str) -> str:
    """Return the name of a Python: "CPython 3.11" for ``.cpython-311-x86_64-linux-gnu.so``."""
    match = re.match(r"\.cpython-3(\d+)(t?)-", suffix)
    return f"CPython 3.{match[1]}{' without the global interpreter lock' * bool(match[2])}" if match else suffix


def _load() -> ModuleType:
    path = _fitting_module()
    spec = spec_from_file_location(__name__, path, loader=ExtensionFileLoader(__name__, str(path)))
    assert spec is not None and spec.loader is not None
    try:
        module = module_from_spec(spec)
    except ImportError as error:
        raise _missing(f"the C++ core of maxmoe cannot be loaded: {error}") from error
    try:
        spec.loader.exec_module(module)
    except ImportError as error:  # of MAXMOE_ISA, or of a sub-interpreter
        raise _missing(str(error)) from error
    return module


sys.modules[__name__] = _load()
