"""Builds maxmoe._C with CMake. Everything else about the package is in pyproject.toml."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

ROOT = Path(__file__).parent.resolve()

try:
    TORCH = distribution("torch")
except PackageNotFoundError:
    raise SystemExit(
        f"maxmoe is built against torch, and {sys.executable} has none: pip install torch==2.13.0"
    ) from None


class CMakeBuild(build_ext):
    """Configures, builds and installs the target `_C` into the package folder. CMAKE_ARGS adds options."""

    def build_extension(self, ext: Extension) -> None:
        folder = build_folder()
        package = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        # The cmake and ninja that pip installed beside this Python come before those of the system.
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        options = [f"-DPython_EXECUTABLE={sys.executable}"]
        # CMake keeps what an earlier build was told: tests/repository/test_cpp.py turns the first two on, `make train`
        # builds for one machine alone.
        options += ["-DMAXMOE_BUILD_TESTS=OFF", "-DMAXMOE_BUILD_BENCHMARKS=OFF", "-DMAXMOE_ISAS=all"]
        options += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        if shutil.which("ninja", path=path):
            options.insert(0, "-GNinja")
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        for command in (
            ["cmake", "-S", str(ROOT), "-B", str(folder), *options],
            ["cmake", "--build", str(folder), "--parallel", jobs],
            ["cmake", "--install", str(folder), "--component", "maxmoe_python", "--prefix", str(package)],
        ):
            try:
                subprocess.run(command, check=True, env=os.environ | {"PATH": path})
            except FileNotFoundError:
                raise ExecError("cmake is missing: pip install cmake ninja pybind11 cmeel-eigen") from None
            except subprocess.CalledProcessError as error:
                raise ExecError(f"building the C++ core failed, see above: {shlex.join(command)}") from error

    def copy_extensions_to_source(self) -> None:
        """Of in-place and editable builds. maxmoe/_library.py needs the record of torch beside the module."""
        super().copy_extensions_to_source()
        shutil.copy(Path(self.build_lib) / "maxmoe" / "_torch_version.txt", ROOT / "maxmoe")


def build_folder() -> Path:
    """One per checkout, Python and torch, kept between builds: setuptools' is new every time."""
    location = Path(TORCH.locate_file("")).resolve()
    key = hashlib.sha256(f"{ROOT} {sys.prefix} {location} {TORCH.version}".encode()).hexdigest()[:8]
    folder = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{TORCH.version}-{key}"
    if not location.is_relative_to(Path(sys.prefix).resolve()):
        # An isolated build: the cache of an earlier one names headers in a temporary folder that is gone.
        shutil.rmtree(folder, ignore_errors=True)
    return folder


def source_files() -> list[str]:
    """What the sdist holds beside the Python package."""
    files = [ROOT / "CMakeLists.txt", ROOT / "Makefile", ROOT / "CITATION.cff", *ROOT.glob("*.md")]
    for folder in ("cpp", "tests", "examples", "benchmarks", "docs"):
        files += sorted(path for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    return [str(path.relative_to(ROOT)) for path in files if path.is_file()]


setup(
    ext_modules=[Extension("maxmoe._C", sources=[], depends=source_files())],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[f"torch=={TORCH.version.split('+')[0]}", "PyYAML>=6"],
)
