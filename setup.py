"""Builds the C++ core with CMake, for one or several releases of torch. The rest of the package is in pyproject.toml.

The core is built for the torch of the environment, also under pip's build isolation. MAXMOE_TORCH, a list of folders
separated by colons, builds one wheel for several releases: `make wheel` sets it. MAXMOE_PYTHON_HEADERS, a
list of folders of Python.h, builds for several Pythons. MAXMOE_ANY_TORCH=1 builds for an older
torch as well: for device checks alone, whose machine may have no other (tests/device/run.sh). MAXMOE_CORE=off installs
the Python package alone, without a compiler: enough for maxmoe.testing, configs, presets, rules and the reference.

MAXMOE_CUDA=on builds the kernels for NVIDIA GPUs as well, which takes nvcc and some minutes; auto, the default, builds
them if there is an nvcc and torch has CUDA, and off does not.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

ROOT = Path(__file__).parent.resolve()
PROJECT = (ROOT / "pyproject.toml").read_text()


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, second = version.split(".")[:2]
    return int(major), int(second)


# The releases of torch in [tool.maxmoe].
SUPPORTED = [
    minor(release) for release in re.findall(r'"([^"]+)"', re.findall(r"^torch = \[(.*)\]$", PROJECT, re.M)[0])
]


def requirement(versions: list[tuple[int, int]]) -> str:
    """The versions of torch from the first to the last minor release."""
    (low_major, low), (high_major, high) = min(versions), max(versions)
    return f"torch>={low_major}.{low},<{high_major}.{high + 1}"


def site_folders() -> list[str]:
    """Where this environment has its packages. Under pip's build isolation they are not on sys.path."""
    return site.getsitepackages() + ([site.getusersitepackages()] if sys.prefix == sys.base_prefix else [])


def torch_folders() -> dict[tuple[int, int], Path]:
    """The folder of torch for each minor release to build for; ends the installation if there is none that fits."""
    named = os.environ.get("MAXMOE_TORCH")
    specs = (
        [PathFinder.find_spec("torch", [folder]) for folder in named.split(os.pathsep)]
        if named
        else [find_spec("torch") or PathFinder.find_spec("torch", site_folders())]
    )
    folders = {}
    for spec in specs:
        if spec is None or spec.origin is None:
            raise SystemExit(
                f"maxmoe is built against the torch that is installed, and there is none in {named or sys.prefix}. "
                f"First run: pip install '{requirement(SUPPORTED)}'"
            )
        folder = Path(spec.origin).parent
        (version,) = re.findall(r"^__version__ = '(.+)'", (folder / "version.py").read_text(), re.M)
        if minor(version) < min(SUPPORTED) and os.environ.get("MAXMOE_ANY_TORCH") != "1":
            raise SystemExit(
                f"maxmoe needs {requirement(SUPPORTED)}, but torch {version} is installed in {folder.parent}. "
                f"Nothing has been changed. To continue, first run: pip install '{requirement(SUPPORTED)}'"
            )
        if not min(SUPPORTED) <= minor(version) <= max(SUPPORTED):
            print(f"maxmoe is tested with {requirement(SUPPORTED)}; building for torch {version}", file=sys.stderr)
        folders[minor(version)] = folder
    return folders


CORE = os.environ.get("MAXMOE_CORE", "on")
if CORE not in ("on", "off"):
    raise SystemExit(f"MAXMOE_CORE must be 'on' or 'off', got {CORE!r}")
CUDA = os.environ.get("MAXMOE_CUDA", "auto")
if CUDA not in ("auto", "on", "off"):
    raise SystemExit(f"MAXMOE_CUDA must be 'auto', 'on' or 'off', got {CUDA!r}")
TORCHES = torch_folders() if CORE == "on" else {}
HEADERS = os.environ.get("MAXMOE_PYTHON_HEADERS", sysconfig.get_path("include"))


class CMakeBuild(build_ext):
    """Configures, builds and installs the core into the package folder. CMAKE_ARGS adds options."""

    def build_extensions(self) -> None:
        folder, package = build_folder(), self._package()
        for earlier in binaries(package):  # for another torch or Python, maybe of other sources
            earlier.unlink()
        # The cmake and ninja that pip installed beside this Python come before those of the system.
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        # CMake keeps what an earlier build was told, maybe that of another environment: `make test` turns the tests and
        # benchmarks on, `make train` builds for one machine alone.
        options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DMAXMOE_TORCH={';'.join(map(str, TORCHES.values()))}"]
        options += ["-DMAXMOE_BUILD_TESTS=OFF", "-DMAXMOE_BUILD_BENCHMARKS=OFF", "-DMAXMOE_ISAS=all"]
        options += [f"-DMAXMOE_CUDA={CUDA}", f"-DMAXMOE_PYTHON_HEADERS={HEADERS.replace(os.pathsep, ';')}"]
        options += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        if ninja := shutil.which("ninja", path=path):
            options += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:  # environments that build at the same time wait for each other
            fcntl.flock(lock, fcntl.LOCK_EX)
            run(["cmake", "-S", str(ROOT), "-B", str(folder), *options], path)
            run(["cmake", "--build", str(folder), "--parallel", jobs], path)
            run(["cmake", "--install", str(folder), "--component", "maxmoe_package", "--prefix", str(package)], path)

    def _package(self) -> Path:
        return Path(self.build_lib, "maxmoe").resolve()

    def get_outputs(self) -> list[str]:
        return [str(path) for path in binaries(self._package())]

    def get_output_mapping(self) -> dict[str, str]:
        package = self._package()
        return {str(path): str(ROOT / "maxmoe" / path.relative_to(package)) for path in binaries(package)}

    def copy_extensions_to_source(self) -> None:
        """Put the files into an editable installation.

        Files for other releases of torch stay, because environments share the sources. Modules for another Python are
        removed with the library that they were linked to.
        """
        package, target = self._package(), ROOT / "maxmoe"
        (target / "libmaxmoe_cuda.so").unlink(missing_ok=True)
        for folder in package.glob("torch*"):
            shutil.rmtree(target / folder.name, ignore_errors=True)
        for built, copied in self.get_output_mapping().items():
            Path(copied).parent.mkdir(exist_ok=True)
            Path(copied).unlink(missing_ok=True)  # not overwritten: a running process may have mapped it
            shutil.copy(built, copied)


def binaries(package: Path) -> list[Path]:
    """The files of the core in a package: a library for each torch, a module for each Python, and the CUDA kernels."""
    return sorted([*package.glob("*.so"), *package.glob("torch*/*.so")])


def run(command: list[str], path: str) -> None:
    """Run a command of CMake, or end the build with its error."""
    try:
        subprocess.run(command, check=True, env=os.environ | {"PATH": path})
    except FileNotFoundError:
        raise ExecError("cmake is missing: pip install cmake ninja cmeel-eigen") from None
    except subprocess.CalledProcessError as error:
        raise ExecError(f"building the C++ core failed, see above: {shlex.join(command)}") from error


def build_folder() -> Path:
    """One per checkout, kept between builds: setuptools' is new every time.

    Environments share it: the kernels and GoogleTest's suite know neither torch nor Python.
    """
    key = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
    folder = ROOT / "build" / f"core-{key}"
    if not Path(setuptools.__file__).is_relative_to(sys.prefix):
        # An isolated build: the cache of an earlier one names headers in a temporary folder that is gone.
        folder = folder.with_name(f"{folder.name}-isolated")
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def source_files() -> list[str]:
    """What the sdist holds beside the Python package."""
    files = [ROOT / "CMakeLists.txt", ROOT / "Makefile", ROOT / "CITATION.cff", *ROOT.glob("*.md")]
    for folder in ("cpp", "tests", "examples", "benchmarks", "docs"):
        files += sorted(path for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    return [str(path.relative_to(ROOT)) for path in files if path.is_file()]


class AnyPythonWheel(bdist_wheel):
    """A wheel with modules for several Pythons: py3-none-linux_x86_64."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    # maxmoe/_C.py loads what fits the running torch and Python.
    ext_modules=[Extension("maxmoe._C", sources=[], depends=source_files())] if TORCHES else [],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
    install_requires=[requirement(list(TORCHES) or SUPPORTED), "PyYAML>=6", "numpy"],
)
