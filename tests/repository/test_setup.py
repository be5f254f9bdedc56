"""setup.py before compilation: the versions of torch that it builds for, and the requirement on torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repository.check_packages import REQUIREMENTS, ROOT, TORCH_REQUIREMENT, TORCHES
from support import programs

pytest.importorskip("setuptools")  # not needed to run maxmoe
MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])


def site_with_torch(folder: Path, version: str) -> str:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").touch()
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")
    return str(folder)


def metadata(
    folder: Path, *, sites: list[str] | None, **variables: str
) -> tuple["subprocess.CompletedProcess[str]", set[str]]:
    """Make the metadata, which pip requests first; return the end of the process, and the requirements."""
    environment = {name: value for name, value in os.environ.items() if name != "MAXMOE_TORCH"} | variables
    if sites is not None:
        environment["MAXMOE_TORCH"] = os.pathsep.join(sites)
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    done = programs.run(command, cwd=ROOT, env=environment)
    path = folder / "maxmoe.egg-info/requires.txt"
    return done, set(path.read_text().partition("\n\n")[0].splitlines()) if path.exists() else set()


OTHERS = {"PyYAML>=6", "numpy"}


def test_what_is_required(tmp_path: Path) -> None:
    """The torch of the environment; with one wheel for several releases, or without the core, any supported one."""
    sites = [site_with_torch(tmp_path / release, f"{release}+cpu") for release in reversed(TORCHES)]
    cases = [
        (metadata(tmp_path, sites=None), f"torch<{MAJOR}.{MINOR + 1},>={MAJOR}.{MINOR}"),
        (metadata(tmp_path, sites=sites), REQUIREMENTS[0]),
        (metadata(tmp_path, sites=[str(tmp_path)], MAXMOE_CORE="off"), REQUIREMENTS[0]),
    ]
    for (done, found), torch_requirement in cases:
        assert done.returncode == 0, done.stderr
        assert found == {torch_requirement, *OTHERS}


@pytest.mark.parametrize(
    ("variables", "version", "message"),
    [
        ({"MAXMOE_CORE": "of"}, None, "MAXMOE_CORE must be 'on' or 'off', got 'of'\n"),
        ({"MAXMOE_CUDA": "yes"}, None, "MAXMOE_CUDA must be 'auto', 'on' or 'off', got 'yes'\n"),
        (
            {},
            "",
            "maxmoe is built against the torch that is installed, and there is none in {site}. "
            f"First run: pip install '{TORCH_REQUIREMENT}'\n",
        ),
        (
            {},
            "2.12.1+cu130",
            f"maxmoe needs {TORCH_REQUIREMENT}, but torch 2.12.1+cu130 is installed in {{site}}. Nothing has been "
            f"changed. To continue, first run: pip install '{TORCH_REQUIREMENT}'\n",
        ),
    ],
)
def test_what_cannot_be_built_is_said_first(
    tmp_path: Path, variables: dict[str, str], version: str | None, message: str
) -> None:
    site = site_with_torch(tmp_path / "site", version) if version else str(tmp_path / "site")
    done, _ = metadata(tmp_path, sites=None if version is None else [site], **variables)
    assert (done.returncode, done.stderr) == (1, message.format(site=site))
    assert not [path for path in tmp_path.iterdir() if path.name != "site"]


@pytest.mark.parametrize(
    ("version", "variables"), [("2.11.0+cu130", {"MAXMOE_ANY_TORCH": "1"}), ("2.99.0.dev20270101", {})]
)
def test_a_torch_that_is_not_tested_is_built_for(tmp_path: Path, version: str, variables: dict[str, str]) -> None:
    """A newer one, and for device checks, whose machine may have no other, an older one."""
    done, found = metadata(tmp_path, sites=[site_with_torch(tmp_path / "site", version)], **variables)
    assert done.returncode == 0
    assert f"maxmoe is tested with {TORCH_REQUIREMENT}; building for torch {version}" in done.stderr
    assert any(requirement.endswith(f">={version[:4]}") for requirement in found)
