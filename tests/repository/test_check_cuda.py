"""check_cuda.py names kernels with spilled registers and missing targets."""

import re
from pathlib import Path

from repository import check_cuda

ROOT = Path(__file__).parents[2]

LOG = "".join(
    f"""\
ptxas info    : Compiling entry function '_Z4kernel' for '{target}'
ptxas info    : Function properties for _Z4kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 0 barriers, 464 bytes cmem[0]
ptxas info    : Compile time = 621.181 ms
"""
    for target, registers in zip(check_cuda.TARGETS, (50, 40, 40, 40), strict=True)
)


def test_logs() -> None:
    assert [kernel[3] for kernel in check_cuda.compiled(LOG)] == [50, 40, 40, 40]
    assert not list(check_cuda.log_complaints("a", LOG))
    spilled = LOG.replace("0 bytes spill loads", "8 bytes spill loads", 1)
    (complaint,) = check_cuda.log_complaints("a", spilled)
    assert complaint.startswith("a: _Z4kernel for sm_80 has ") and "8 bytes spill loads" in complaint
    assert list(check_cuda.log_complaints("a", LOG.replace("'sm_90'", "'sm_80'"))) == ["a: no kernel for sm_90"]


def test_both_builds_compile_for_the_same_targets() -> None:
    """`make cuda`, whose machine code is checked, and the build of the package."""
    texts = [(ROOT / name).read_text() for name in ("Makefile", "cpp/cmake/cuda.cmake")]
    by_make, by_cmake = ({*re.findall(r"-gencode=arch=\w+,code=(\w+)", text)} for text in texts)
    assert by_make == by_cmake == {*check_cuda.TARGETS, "compute_90"}
