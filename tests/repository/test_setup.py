"""What setup.py decides before anything is compiled: for which torch it builds, and which torch it then requires."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repository.check_packages import PROJECT, REQUIREMENTS, ROOT

pytest.importorskip("setuptools")  # has no part in running maxmoe
MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])


def site_with_torch(folder: Path, version: str) -> str:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").touch()
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")
    return str(folder)


def metadata(folder: Path, *, sites: list[str] | None) -> subprocess.CompletedProcess[str]:
    """The first thing that pip asks for."""
    environment = {name: value for name, value in os.environ.items() if name != "MAXMOE_TORCH"}
    if sites is not None:
        environment["MAXMOE_TORCH"] = os.pathsep.join(sites)
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def required(folder: Path) -> set[str]:
    lines = (folder / "maxmoe.egg-info/requires.txt").read_text().partition("\n\n")[0]
    return set(lines.splitlines())


def test_the_torch_of_the_environment_is_required(tmp_path: Path) -> None:
    done = metadata(tmp_path, sites=None)
    assert done.returncode == 0, done.stderr
    assert required(tmp_path) == {f"torch<{MAJOR}.{MINOR + 1},>={MAJOR}.{MINOR}", "PyYAML>=6"}


def test_one_wheel_for_several_releases_accepts_each_of_them(tmp_path: Path) -> None:
    sites = [site_with_torch(tmp_path / version, version) for version in ("2.15.0+cu132", "2.13.0+cpu", "2.14.1")]
    done = metadata(tmp_path, sites=sites)
    assert done.returncode == 0, done.stderr
    assert required(tmp_path) == {REQUIREMENTS[0], "PyYAML>=6"}


def test_no_torch_is_said_first(tmp_path: Path) -> None:
    done = metadata(tmp_path, sites=[str(tmp_path)])
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr == (
        f"maxmoe is built against the torch that is installed, and there is none in {tmp_path}. "
        "First run: pip install 'torch>=2.13,<2.16'\n"
    )


def test_an_older_torch_is_said_first_and_stays(tmp_path: Path) -> None:
    folder = site_with_torch(tmp_path / "site", "2.12.1+cu130")
    done = metadata(tmp_path, sites=[folder])
    assert done.returncode == 1 and [path.name for path in tmp_path.iterdir()] == ["site"]
    assert done.stderr == (
        f"maxmoe needs torch>=2.13,<2.16, but torch 2.12.1+cu130 is installed in {folder}. Nothing has been changed. "
        "To continue, first run: pip install 'torch>=2.13,<2.16'\n"
    )


def test_a_newer_torch_is_built_for(tmp_path: Path) -> None:
    done = metadata(tmp_path, sites=[site_with_torch(tmp_path / "site", "2.99.0.dev20270101")])
    assert done.returncode == 0
    assert "maxmoe is tested with torch>=2.13,<2.16; building for torch 2.99.0.dev20270101" in done.stderr
    assert "torch<2.100,>=2.99" in required(tmp_path)


def test_the_releases_are_the_same_everywhere() -> None:
    releases = re.findall(r'"([^"]+)"', re.findall(r"^torch = \[(.*)\]$", PROJECT, re.MULTILINE)[0])
    minors = [".".join(release.split(".")[:2]) for release in releases]
    assert f'"{":".join(f"/tmp/torch{release}" for release in releases)}"' in PROJECT  # of cibuildwheel
    assert f"for version in {' '.join(releases)}; do" in PROJECT
    readme = (ROOT / "README.md").read_text()
    assert f"{', '.join(minors[:-1])} or {minors[-1]}" in readme
    low, high = REQUIREMENTS[0].removeprefix("torch").split(",")[::-1]
    assert f"pip install 'torch{low},{high}'" in readme
