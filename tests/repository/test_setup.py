"""setup.py before compilation: the versions of torch that it builds for, and the requirement on torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repository.check_packages import MINORS, PROJECT, REQUIREMENTS, ROOT, TORCH_REQUIREMENT, TORCHES
from support import programs

pytest.importorskip("setuptools")  # not needed to run maxmoe
MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])


def site_with_torch(folder: Path, version: str) -> str:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").touch()
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")
    return str(folder)


def metadata(folder: Path, *, sites: list[str] | None, **variables: str) -> subprocess.CompletedProcess[str]:
    """The metadata, which pip requests first."""
    environment = {name: value for name, value in os.environ.items() if name != "MAXMOE_TORCH"} | variables
    if sites is not None:
        environment["MAXMOE_TORCH"] = os.pathsep.join(sites)
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    return programs.run(command, cwd=ROOT, env=environment)


def required(folder: Path) -> set[str]:
    lines = (folder / "maxmoe.egg-info/requires.txt").read_text().partition("\n\n")[0]
    return set(lines.splitlines())


def test_the_torch_of_the_environment_is_required(tmp_path: Path) -> None:
    done = metadata(tmp_path, sites=None)
    assert done.returncode == 0, done.stderr
    assert required(tmp_path) == {f"torch<{MAJOR}.{MINOR + 1},>={MAJOR}.{MINOR}", "PyYAML>=6", "numpy"}


def test_one_wheel_for_several_releases_accepts_each_of_them(tmp_path: Path) -> None:
    sites = [site_with_torch(tmp_path / release, f"{release}+cpu") for release in reversed(TORCHES)]
    done = metadata(tmp_path, sites=sites)
    assert done.returncode == 0, done.stderr
    assert required(tmp_path) == {REQUIREMENTS[0], "PyYAML>=6", "numpy"}


def test_without_the_core_every_torch_will_do(tmp_path: Path) -> None:
    done = metadata(tmp_path, sites=[str(tmp_path)], MAXMOE_CORE="off")
    assert done.returncode == 0, done.stderr
    assert required(tmp_path) == {REQUIREMENTS[0], "PyYAML>=6", "numpy"}


def test_a_misspelt_choice_of_the_core_is_an_error(tmp_path: Path) -> None:
    done = metadata(tmp_path, sites=None, MAXMOE_CORE="of")
    assert done.returncode == 1 and done.stderr == "MAXMOE_CORE must be 'on' or 'off', got 'of'\n"


def test_a_misspelt_choice_of_the_cuda_kernels_is_an_error(tmp_path: Path) -> None:
    done = metadata(tmp_path, sites=None, MAXMOE_CUDA="yes")
    assert done.returncode == 1 and done.stderr == "MAXMOE_CUDA must be 'auto', 'on' or 'off', got 'yes'\n"


def test_no_torch_is_said_first(tmp_path: Path) -> None:
    done = metadata(tmp_path, sites=[str(tmp_path)])
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr == (
        f"maxmoe is built against the torch that is installed, and there is none in {tmp_path}. "
        f"First run: pip install '{TORCH_REQUIREMENT}'\n"
    )


def test_an_older_torch_is_said_first_and_stays(tmp_path: Path) -> None:
    folder = site_with_torch(tmp_path / "site", "2.12.1+cu130")
    done = metadata(tmp_path, sites=[folder])
    assert done.returncode == 1 and [path.name for path in tmp_path.iterdir()] == ["site"]
    assert done.stderr == (
        f"maxmoe needs {TORCH_REQUIREMENT}, but torch 2.12.1+cu130 is installed in {folder}. Nothing has been changed. "
        f"To continue, first run: pip install '{TORCH_REQUIREMENT}'\n"
    )


def test_an_older_torch_is_built_for_if_asked(tmp_path: Path) -> None:
    """Device checks need it, because their machine may have an older torch only."""
    done = metadata(tmp_path, sites=[site_with_torch(tmp_path / "site", "2.11.0+cu130")], MAXMOE_ANY_TORCH="1")
    assert done.returncode == 0
    assert f"maxmoe is tested with {TORCH_REQUIREMENT}; building for torch 2.11.0+cu130" in done.stderr


def test_a_newer_torch_is_built_for(tmp_path: Path) -> None:
    done = metadata(tmp_path, sites=[site_with_torch(tmp_path / "site", "2.99.0.dev20270101")])
    assert done.returncode == 0
    assert f"maxmoe is tested with {TORCH_REQUIREMENT}; building for torch 2.99.0.dev20270101" in done.stderr
    assert "torch<2.100,>=2.99" in required(tmp_path)


def test_the_releases_are_the_same_everywhere() -> None:
    assert f'"{":".join(f"/tmp/torch{release}" for release in TORCHES)}"' in PROJECT  # for cibuildwheel
    assert f"for version in {' '.join(TORCHES)}; do" in PROJECT
    minors = [f"{major}.{minor}" for major, minor in MINORS]
    assert f"{', '.join(minors[:-1])} or {minors[-1]}" in (ROOT / "README.md").read_text()


def test_environments_with_different_torch_share_the_sources(tmp_path: Path) -> None:
    """An editable installation keeps the files for another torch, and none that belong to an earlier library."""
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    kept = ["libmaxmoe_torch2_99.so", "torch2.99/_C.a.so", "libmaxmoe_cuda_emulator.so"]
    built = ["libmaxmoe_torch2_13.so", "torch2.13/_C.a.so"]
    before = [*kept, *built, "torch2.13/_C.of_another_python.so", "libmaxmoe_cuda.so"]
    for folder, names, text in (("maxmoe", before, "earlier"), ("lib/maxmoe", built, "built")):
        for name in names:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    code = """
import setuptools
from distutils.core import run_setup
command = run_setup("setup.py", stop_after="init").get_command_obj("build_ext")
command.build_lib = "lib"
command.copy_extensions_to_source()
"""
    programs.printed(programs.python(code, cwd=tmp_path))
    package = tmp_path / "maxmoe"
    found = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.so")}
    assert found == dict.fromkeys(kept, "earlier") | dict.fromkeys(built, "built")
