"""What is written in several files is the same in all of them: version, releases of torch, targets of CUDA."""

import re

from repository import check_cuda
from repository.check_packages import MINORS, PROJECT, ROOT, TORCHES, VERSION


def test_version() -> None:
    released = re.findall(r"^## \[(\d.*)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert released[0][0] == VERSION
    assert f"\nversion: {VERSION}\ndate-released: {released[0][1]}\n" in citation


def test_releases_of_torch() -> None:
    assert f'"{":".join(f"/tmp/torch{release}" for release in TORCHES)}"' in PROJECT  # for cibuildwheel
    assert f"for version in {' '.join(TORCHES)}; do" in PROJECT
    minors = [f"{major}.{minor}" for major, minor in MINORS]
    assert f"{', '.join(minors[:-1])} or {minors[-1]}" in (ROOT / "README.md").read_text()


def test_targets_of_cuda() -> None:
    """`make cuda`, whose machine code is checked, and the build of the package."""
    texts = [(ROOT / name).read_text() for name in ("Makefile", "cpp/cmake/cuda.cmake")]
    by_make, by_cmake = ({*re.findall(r"(?<=[\[,])(?:sm|compute)_\d+(?=[\],])", text)} for text in texts)
    assert by_make == by_cmake == {*check_cuda.TARGETS, "compute_100"}
