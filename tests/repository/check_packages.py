"""Reports missing and unexpected files in a wheel or an sdist; `make wheel` runs it.

    python tests/repository/check_packages.py dist/*

A wheel holds the files of git in maxmoe/, the C++ core, and nothing else: no tests, no files of earlier builds. An
sdist holds all files of git, except files and folders that begin with a dot.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
VERSION = "".join(re.findall(r'^version = "(.*)"$', PROJECT, re.MULTILINE))
# The releases of torch in [tool.maxmoe], and the requirement that accepts them.
TORCHES = re.findall(r'"([\d.]+)"', "".join(re.findall(r"^torch = \[(.*)\]$", PROJECT, re.MULTILINE)))
MINORS = [tuple(map(int, release.split(".")[:2])) for release in TORCHES]
LOW, HIGH = f">={MINORS[0][0]}.{MINORS[0][1]}", f"<{MINORS[-1][0]}.{MINORS[-1][1] + 1}"
TORCH_REQUIREMENT = f"torch{LOW},{HIGH}"
REQUIREMENTS = (f"torch{HIGH},{LOW}", "PyYAML>=", "numpy")  # in the order of setuptools
# Written by the build: a library for each torch, and a module for each torch and Python.
PYTHONS = re.findall(r'"Programming Language :: Python :: (3)\.(\d+)"', PROJECT)
CORE = {f"maxmoe/libmaxmoe_torch{major}_{minor}.so" for major, minor in MINORS} | {
    f"maxmoe/torch{major}.{minor}/_C.cpython-{first}{second}-x86_64-linux-gnu.so"
    for major, minor in MINORS
    for first, second in PYTHONS
}
WHEEL_RECORDS = {"METADATA", "RECORD", "WHEEL", "top_level.txt", "licenses/LICENSE", "licenses/THIRD_PARTY_LICENSES"}
SDIST_RECORDS = {"PKG-INFO", "setup.cfg"}
MANYLINUX = r"maxmoe-[\d.]+-py3-none-manylinux_2_\d+_x86_64(\.manylinux_2_\d+_x86_64|\.manylinux2014_x86_64)*\.whl"


def tracked() -> set[str]:
    """The files of git without those that begin with a dot, or are in such a folder, and links to folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {path for path in listed.split("\0") if path and not path.startswith(".") and not (ROOT / path).is_dir()}


def differences(found: set[str], expected: set[str]) -> Iterator[str]:
    yield from (f"it lacks {path}" for path in sorted(expected - found))
    yield from (f"it has {path}, which does not belong there" for path in sorted(found - expected))


def wheel_complaints(path: Path, sources: set[str]) -> Iterator[str]:
    with zipfile.ZipFile(path) as wheel:
        found = {name for name in wheel.namelist() if not name.endswith("/")}
        records = f"maxmoe-{VERSION}.dist-info"
        metadata = wheel.read(f"{records}/METADATA").decode() if f"{records}/METADATA" in found else ""
    if not re.fullmatch(MANYLINUX, path.name):
        yield "its name must have the tag py3-none, for every Python, and a manylinux tag, from auditwheel repair"
    package = {source for source in sources if source.startswith("maxmoe/")}
    yield from differences(found, package | CORE | {f"{records}/{name}" for name in WHEEL_RECORDS})
    yield from metadata_complaints(metadata)


def sdist_complaints(path: Path, sources: set[str]) -> Iterator[str]:
    base = f"maxmoe-{VERSION}/"
    with tarfile.open(path) as sdist:
        files = {member.name.removeprefix(base): member for member in sdist.getmembers() if member.isfile()}
        record = sdist.extractfile(files["PKG-INFO"]) if "PKG-INFO" in files else None
        metadata = record.read().decode() if record else ""
    found = {name for name in files if not name.startswith("maxmoe.egg-info/")}
    yield from differences(found, sources | SDIST_RECORDS)
    yield from metadata_complaints(metadata)


def metadata_complaints(text: str) -> Iterator[str]:
    """Return complaints about the metadata that PyPI shows and pip reads."""
    metadata = HeaderParser().parsestr(text)
    if metadata["Version"] != VERSION:
        yield f"its version is {metadata['Version']}, pyproject.toml has {VERSION}"
    required = metadata.get_all("Requires-Dist", [])
    for wanted in REQUIREMENTS:
        if not any(requirement.startswith(wanted) for requirement in required):
            yield f"it does not require {wanted}"


def complaints(path: Path, sources: set[str]) -> list[str]:
    check = wheel_complaints if path.suffix == ".whl" else sdist_complaints
    return [f"{path.name}: {complaint}" for complaint in check(path, sources)]


if __name__ == "__main__":
    found = [complaint for path in sys.argv[1:] for complaint in complaints(Path(path), tracked())]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found) or len(sys.argv) < 2)
