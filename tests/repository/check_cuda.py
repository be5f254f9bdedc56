"""Complains about compiled CUDA kernels; `make cuda` runs it.

    python tests/repository/check_cuda.py build/cuda

No kernel may have a stack frame or spill registers, according to the logs of ptxas. The library must have machine code
for compute capability 8.0, 9.0, 10.0 and 12.0, and PTX; the grouped products of 16-bit numbers must run on the matrix
units (HMMA). Kernels over rows of bfloat16 have no indirect branch, and so many blocks and loads at a time as the table
HOT says, which is printed beside what was found.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")
CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
COMPILED = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'(?:\n.*)??\n +(.*)\n.*Used (\d+) registers")
# A kernel of gmm or tgmm multiplies 16-bit numbers if its name has this, as mangled by the compiler.
MATRIX_UNITS = re.compile(r"tensor_core(_rows)?8multiplyIN")
NUM_PRODUCTS = 12  # 8 of gmm, 4 of tgmm

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+) )?\s*([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
INDIRECT = ("BRX", "JMX")
THREADS = 256  # of a block of these kernels
VECTOR = 16  # bytes of a load


class Hot(NamedTuple):
    """A kernel whose time is the time of its bytes, and limits of its machine code for compute capability 9.0.

    Attributes:
        name: of the kernel, for a person.
        pattern: its template arguments, as mangled by the compiler: bfloat16, in vectors.
        blocks: the least number of blocks that fit on a multiprocessor at a time.
        loads: the least number of vectors that a thread loads before it reads the first one.
    """

    name: str
    pattern: str
    blocks: int
    loads: int


BFLOAT16 = "INS_8BFloat16ELi8E"
SILU = "NS0_14ActivationFormILNS_10ActivationE0ELb1ELb0E"
SWIGLUOAI = "NS0_14ActivationFormILNS_10ActivationE5ELb1ELb1E"
HOT = (
    Hot("gather_rows", f"gather_rows{BFLOAT16}", 8, 1),
    Hot("sum_rows, one matrix", f"sum_rows{BFLOAT16}Li1E", 3, 4),
    Hot("sum_rows, two matrices", f"sum_rows{BFLOAT16}Li2E", 3, 4),
    Hot("add_slots", f"add_slots{BFLOAT16}", 2, 4),
    Hot("multiply_rows", f"multiply_rows{BFLOAT16}", 8, 2),
    Hot("activate_elements, silu", f"activate_elements{BFLOAT16}{SILU}", 6, 2),
    Hot("activate_elements, swigluoai", f"activate_elements{BFLOAT16}{SWIGLUOAI}", 6, 2),
    Hot("backward_of_rows, silu", f"backward_of_rows{BFLOAT16}{SILU}", 4, 3),
    Hot("backward_of_rows, swigluoai", f"backward_of_rows{BFLOAT16}{SWIGLUOAI}", 4, 3),
)
HOT_TARGET = "sm_90"


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


def blocks_of(registers: int) -> int:
    """Return the blocks of 256 threads whose registers, and threads, fit on a multiprocessor."""
    per_thread = -(-registers // 8) * 8
    return min(65536 // (per_thread * THREADS), 2048 // THREADS)


def registers_in(text: str, size: int = 1) -> set[int]:
    """Return the numbers of the registers in operands; `size`: registers of an operand that is not an address."""
    found = set()
    for number, is_pair in re.findall(r"\bR(\d+)(\.64)?", text):
        found |= set(range(int(number), int(number) + (2 if is_pair else size)))
    return found


def most_loads(code: str) -> int:
    """Return the largest number of vectors that are loaded before the first one is read, without a branch between."""
    instructions = INSTRUCTION.findall(code)
    targets = {int(rest.split()[-1], 16) for _, _, op, rest in instructions if op.startswith("BRA")}
    pending: list[tuple[str, set[int]]] = []
    most = 0
    for address, predicate, op, operands in instructions:
        if int(address, 16) in targets:
            pending = []
        to, _, rest = operands.partition(",")
        is_store = op.startswith("ST")
        read = registers_in(operands if is_store else rest, 4 if is_store and ".128" in op else 1)
        if any(read & load for _, load in pending) or op in ("EXIT", "RET"):
            pending = []
        if op.startswith("LDG") and ".128" in op:
            pending.append((predicate, registers_in(to, 4)))
            most = max(most, number_at_once([predicate for predicate, _ in pending]))
    return most


def number_at_once(predicates: list[str]) -> int:
    """Return the largest number of instructions that run: of two opposite predicates one holds."""
    names = {predicate.removeprefix("!") for predicate in predicates}
    return sum(max(predicates.count(name), predicates.count(f"!{name}")) for name in names)


def hot_complaints(code: dict[str, str], registers: dict[str, int]) -> Iterator[str]:
    """Print the table of hot kernels; return the complaints about them."""
    for hot in HOT:
        found = [name for name in code if hot.pattern in name]
        if len(found) != 1:
            yield f"{len(found)} kernels {hot.name}, there should be 1"
            continue
        text, number = code[found[0]], registers[found[0]]
        operations = [op for _, _, op, _ in INSTRUCTION.findall(text)]
        indirect = sum(op.startswith(INDIRECT) for op in operations)
        blocks, loads = blocks_of(number), most_loads(text)
        kilobytes = blocks * THREADS * loads * VECTOR // 1024
        print(
            f"{hot.name:28s} {len(operations):5d} instructions, {indirect} indirect branches, {number:3d} registers, "
            f"{blocks} blocks (>= {hot.blocks}), {loads} loads (>= {hot.loads}): {kilobytes} KB in flight"
        )
        if indirect or blocks < hot.blocks or loads < hot.loads:
            yield (
                f"{hot.name} for {HOT_TARGET} has {indirect} indirect branches, {blocks} blocks and {loads} loads, "
                f"there should be 0, at least {hot.blocks} and {hot.loads}"
            )


def cuobjdump(*arguments: str) -> str:
    """Run cuobjdump."""
    return subprocess.run(["cuobjdump", *arguments], check=True, capture_output=True, text=True).stdout


def code_for(library: Path, target: str) -> dict[str, str]:
    """Return the machine code of each kernel."""
    listing = cuobjdump("--dump-sass", "--gpu-architecture", target, str(library))
    return {function.split()[0]: function for function in re.split(r"\n\s*Function : ", listing)[1:]}


def code_complaints(library: Path, registers: dict[str, int]) -> Iterator[str]:
    """Return the complaints about the machine code of the library."""
    elves, ptx = cuobjdump("--list-elf", str(library)), cuobjdump("--list-ptx", str(library))
    yield from (f"no machine code for {target}" for target in TARGETS if f".{target}." not in elves)
    if "ptx" not in ptx:
        yield "no PTX for later devices"
    for target in TARGETS:
        code = code_for(library, target)
        products = [name for name in code if MATRIX_UNITS.search(name)]
        if len(products) != NUM_PRODUCTS:
            yield f"{len(products)} kernels for the matrix units of {target}, there should be {NUM_PRODUCTS}"
        yield from (f"{name} for {target} has no HMMA" for name in products if "HMMA.16816.F32" not in code[name])
        if target == HOT_TARGET:
            yield from hot_complaints(code, registers)


def main() -> int:
    """Print a line for each file and hot kernel, and the complaints; return whether there are any."""
    folder = Path(sys.argv[1])
    found: list[str] = []
    registers: dict[str, int] = {}
    for log in sorted(folder.glob("*.log")):
        text = log.read_text()
        kernels = compiled(text)
        found += log_complaints(log.stem, text)
        registers |= {kernel: number for kernel, target, _, number in kernels if target == HOT_TARGET}
        print(f"{log.stem}: {len(kernels)} kernels, at most {max((k[3] for k in kernels), default=0)} registers")
    library = folder / "libmaxmoe_cuda.so"
    found += code_complaints(library, registers)
    print(f"{library}: {library.stat().st_size / 1e6:.1f} MB")
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
