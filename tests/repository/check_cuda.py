"""Complains about compiled CUDA kernels; `make cuda` runs it.

    python tests/repository/check_cuda.py build/cuda

No kernel may have a stack frame or spill registers, according to the logs of ptxas. The library must have machine code
for compute capability 8.0 and 9.0, and PTX; the grouped products of 16-bit numbers must run on the matrix units (HMMA).
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TARGETS = ("sm_80", "sm_90")
CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
COMPILED = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'(?:\n.*)??\n +(.*)\n.*Used (\d+) registers")
# A kernel of gmm or tgmm multiplies 16-bit numbers if its name has this, as mangled by the compiler.
MATRIX_UNITS = re.compile(r"tensor_core(_rows)?8multiplyIN")
NUM_PRODUCTS = 12  # 8 of gmm, 4 of tgmm


def compiled(log: str) -> list[tuple[str, str, str, int]]:
    """Return kernel, target, memory and number of registers of every kernel in a log of ptxas."""
    return [(kernel, target, memory, int(registers)) for kernel, target, memory, registers in COMPILED.findall(log)]


def log_complaints(name: str, log: str) -> Iterator[str]:
    """Return the complaints about the kernels of a file."""
    kernels = compiled(log)
    for target in TARGETS:
        if not any(kernel[1] == target for kernel in kernels):
            yield f"{name}: no kernel for {target}"
    for kernel, target, memory, _ in kernels:
        if memory != CLEAN:
            yield f"{name}: {kernel} for {target} has {memory}"


def cuobjdump(*arguments: str) -> str:
    """Run cuobjdump."""
    return subprocess.run(["cuobjdump", *arguments], check=True, capture_output=True, text=True).stdout


def code_complaints(library: Path) -> Iterator[str]:
    """Return the complaints about the machine code of the library."""
    elves, ptx = cuobjdump("--list-elf", str(library)), cuobjdump("--list-ptx", str(library))
    yield from (f"no machine code for {target}" for target in TARGETS if f".{target}." not in elves)
    if "ptx" not in ptx:
        yield "no PTX for later devices"
    for target in TARGETS:
        listing = cuobjdump("--dump-sass", "--gpu-architecture", target, str(library))
        code = {function.split()[0]: function for function in re.split(r"\n\s*Function : ", listing)[1:]}
        products = [name for name in code if MATRIX_UNITS.search(name)]
        if len(products) != NUM_PRODUCTS:
            yield f"{len(products)} kernels for the matrix units of {target}, there should be {NUM_PRODUCTS}"
        yield from (f"{name} for {target} has no HMMA" for name in products if "HMMA.16816.F32" not in code[name])


def main() -> int:
    """Print a line for each file and the complaints; return whether there are any."""
    folder = Path(sys.argv[1])
    found = []
    for log in sorted(folder.glob("*.log")):
        text = log.read_text()
        kernels = compiled(text)
        found += log_complaints(log.stem, text)
        print(f"{log.stem}: {len(kernels)} kernels, at most {max((k[3] for k in kernels), default=0)} registers")
    library = folder / "libmaxmoe_cuda.so"
    found += code_complaints(library)
    print(f"{library}: {library.stat().st_size / 1e6:.1f} MB")
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
