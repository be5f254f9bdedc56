"""The checks of `make wheel`, on small packages made here; and that all files have the same version."""

import io
import re
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from repository import check_packages
from repository.check_packages import CORE, ROOT, SDIST_RECORDS, VERSION, WHEEL_RECORDS, complaints

SOURCES = {"README.md", "maxmoe/__init__.py", "maxmoe/py.typed", "tests/conftest.py", "tests/golden/route.json"}
METADATA = f"""Metadata-Version: 2.4
Name: maxmoe
Version: {VERSION}
Requires-Dist: {check_packages.REQUIREMENTS[0]}
Requires-Dist: PyYAML>=6
Requires-Dist: numpy
"""
WHEEL = f"maxmoe-{VERSION}-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
WHEEL_FILES = {
    *CORE,
    *(path for path in SOURCES if path.startswith("maxmoe/")),
    *(f"maxmoe-{VERSION}.dist-info/{name}" for name in WHEEL_RECORDS),
}
SDIST = f"maxmoe-{VERSION}.tar.gz"
SDIST_FILES = SOURCES | SDIST_RECORDS | {"maxmoe.egg-info/SOURCES.txt"}


def write(path: Path, files: Iterable[str], metadata: str) -> None:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as wheel:
            for name in files:
                wheel.writestr(name, metadata if name.endswith("METADATA") else "")
    else:
        with tarfile.open(path, "w:gz") as sdist:
            for name in files:
                content = metadata.encode() if name == "PKG-INFO" else b""
                member = tarfile.TarInfo(f"maxmoe-{VERSION}/{name}")
                member.size = len(content)
                sdist.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("name", "files", "metadata", "complaint"),
    [
        (WHEEL, WHEEL_FILES, METADATA, ""),
        (SDIST, SDIST_FILES, METADATA, ""),
        (WHEEL, WHEEL_FILES | {"build/lib/maxmoe/old.py"}, METADATA, "it has build/lib/maxmoe/old.py, which does not"),
        (SDIST, SDIST_FILES - {"maxmoe/py.typed"}, METADATA, "it lacks maxmoe/py.typed"),
        (WHEEL, WHEEL_FILES | {"maxmoe.libs/libgomp-a34b3233.so.1"}, METADATA, "it has maxmoe.libs/libgomp"),
        (SDIST, SDIST_FILES, METADATA.replace(f"Version: {VERSION}", "Version: 0.0.9"), "its version is 0.0.9, pypro"),
        (WHEEL, WHEEL_FILES, METADATA.replace("torch<", "torch==2.13.0,<"), "it does not require torch<"),
        (WHEEL.replace("manylinux_2_27_x86_64.manylinux_2_28", "linux"), WHEEL_FILES, METADATA, "its name must have"),
    ],
)
def test_what_does_not_belong_is_named(
    tmp_path: Path, name: str, files: set[str], metadata: str, complaint: str
) -> None:
    write(tmp_path / name, files, metadata)
    found = complaints(tmp_path / name, SOURCES)
    assert len(found) == bool(complaint) and all(line.startswith(f"{name}: {complaint}") for line in found), found


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an sdist has no list of the files of git")
def test_git_has_what_a_wheel_must_have() -> None:
    assert {"maxmoe/py.typed", "maxmoe/sharding/presets/ep-tp.yaml"} <= check_packages.tracked()


def test_the_version_is_written_the_same_everywhere() -> None:
    released = re.findall(r"^## \[(\d.*)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert released[0][0] == VERSION
    assert f"\nversion: {VERSION}\ndate-released: {released[0][1]}\n" in citation
