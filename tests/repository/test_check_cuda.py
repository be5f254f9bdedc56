"""check_cuda.py names kernels with spilled registers, missing targets and products without the matrix units."""

import re
from pathlib import Path

import pytest

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


def test_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"_ZN11tensor_core8multiplyIN{number}" for number in range(8)]
    names += [f"_ZN16tensor_core_rows8multiplyIN{number}" for number in range(4)]
    code = dict.fromkeys(names, "HMMA.16816.F32.BF16 R4, R8, R12, R4")

    def cuobjdump(*arguments: str) -> str:
        if arguments[0] == "--list-elf":
            return "".join(f"ELF file 1: a.{target}.cubin\n" for target in check_cuda.TARGETS)
        if arguments[0] == "--list-ptx":
            return "PTX file 1: a.sm_90.ptx\n"
        return "".join(f"\n\t\tFunction : {name}\n{text}\n" for name, text in code.items())

    monkeypatch.setattr(check_cuda, "cuobjdump", cuobjdump)
    monkeypatch.setattr(check_cuda, "HOT", ())
    assert not list(check_cuda.code_complaints(Path("a.so"), {}))
    code[names[0]] = "FFMA R4, R8, R12, R4"
    assert list(check_cuda.code_complaints(Path("a.so"), {})) == [
        f"{names[0]} for {target} has no HMMA" for target in check_cuda.TARGETS
    ]


def test_both_builds_compile_for_the_same_targets() -> None:
    """`make cuda`, whose machine code is checked, and the build of the package."""
    texts = [(ROOT / name).read_text() for name in ("Makefile", "cpp/cmake/cuda.cmake")]
    by_make, by_cmake = ({*re.findall(r"-gencode=arch=\w+,code=(\w+)", text)} for text in texts)
    assert by_make == by_cmake == {*check_cuda.TARGETS, "compute_90"}
