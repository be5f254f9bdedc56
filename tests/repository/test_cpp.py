"""Builds the GoogleTest suite of the kernels (cpp/tests) and runs it with every instruction set there is.

The tests of the CUDA kernels (cpp/cuda/tests) are built with it, and run in the emulator. The benchmarks of the kernels
(cpp/benchmarks) are built with it, too, and run on small sizes.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import maxmoe
from support import programs
from support.slow_cases import by_default

pytestmark = pytest.mark.timeout(7200)  # each step of a build has its own bound

ROOT = Path(__file__).parents[2]
ISAS = maxmoe.build_info()["supported_isas"]
BEST = max(set(ISAS) - {"amx_emulated"}, key=ISAS.index)
PROGRAMS = ("maxmoe_kernels_tests", "maxmoe_library_tests", "maxmoe_cuda_tests", "maxmoe_kernels_benchmarks")
# The cmake and ninja that pip installed beside this Python precede the system's.
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])


def run(*command: str, seconds: float = programs.MAX_SECONDS, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PATH": PATH} | environment
    return programs.run(command, seconds=seconds, env=variables, stderr=subprocess.STDOUT)


def build_step(*command: str) -> None:
    done = run(*command, seconds=3600.0)
    if done.returncode != 0:
        lines = done.stdout.splitlines()
        first = next((i for i, line in enumerate(lines) if re.search("error|FAILED", line, re.IGNORECASE)), 0)
        pytest.fail("\n".join([f"$ {' '.join(command)}", *lines[first : first + 60]]), pytrace=False)


@pytest.fixture(scope="module")
def build_folder() -> Path:
    """The build folder of the core, if it was built here, so that its kernels are not compiled again."""
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DMAXMOE_BUILD_TESTS=ON", "-DMAXMOE_BUILD_BENCHMARKS=ON"]
    caches = sorted((ROOT / "build").glob("core-????????/CMakeCache.txt"), key=lambda path: path.stat().st_mtime)
    folder = caches[-1].parent if caches else None
    if folder is not None:  # maybe last configured for the torch of an environment that no longer exists
        options += [f"-DMAXMOE_TORCH={Path(torch.__file__).parent}"]
    else:
        folder = ROOT / "build/tests"
        options += ["-GNinja"]
    options += [f"-DCMAKE_MAKE_PROGRAM={ninja}"] if (ninja := shutil.which("ninja", path=PATH)) else []
    build_step("cmake", "-S", str(ROOT), "-B", str(folder), *options)
    build_step("cmake", "--build", str(folder), "--target", *PROGRAMS)
    return folder


def run_suite(program: Path, *options: str, isa: str = BEST) -> None:
    done = run(str(program), "--gtest_brief=1", *options, MAXMOE_ISA=isa)
    if done.returncode != 0 or not re.search(r"PASSED.* [1-9]\d* tests", done.stdout):
        pytest.fail("\n".join([f"MAXMOE_ISA={isa}", *done.stdout.splitlines()[-200:]]), pytrace=False)


# By default the best instruction set of this processor: all are compiled from the same sources.
@pytest.mark.parametrize("isa", by_default(ISAS, [BEST]))
def test_kernels(build_folder: Path, isa: str) -> None:
    """Run all tests in one process, not one per test. Tests of Pairs and Amx choose their kernels themselves."""
    others = "*bfloat16*" if isa == "amx_emulated" else "-Pairs.*:Amx.*"  # it multiplies bfloat16 alone
    options = [f"--gtest_filter={others}"] if isa != BEST else []
    run_suite(build_folder / "cpp/tests/maxmoe_kernels_tests", *options, isa=isa)


def test_codes_are_decoded_one_by_one(build_folder: Path) -> None:
    """Run with the baseline, because AVX2 decodes every code of a table in vectors."""
    tests = "--gtest_filter=*Dequantize*"
    run_suite(build_folder / "cpp/tests/maxmoe_kernels_tests", tests, isa="baseline")


@pytest.mark.parametrize("program", ["cpp/tests/maxmoe_library_tests", "cpp/cuda/tests/maxmoe_cuda_tests"])
def test_program(build_folder: Path, program: str) -> None:
    run_suite(build_folder / program)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512bf16", "amx", "amx_emulated"])
def test_instruction_sets_share_no_code(build_folder: Path, isa: str) -> None:
    """The linker keeps one definition of a weak function: two instruction sets must not define the same one.

    Weak objects, such as the tables of a format, are constants that have one value in all of them.
    """
    objects = sorted(build_folder.glob(f"CMakeFiles/maxmoe_kernels_{isa}.dir/**/*.o"))
    if not objects:
        pytest.skip(f"this build has no kernels for {isa}")
    symbols = run("nm", "--print-file-name", *map(str, objects))
    assert symbols.returncode == 0, symbols.stdout
    own = (f"{len(isa)}{isa}", f"Eigen_{isa}", "DW.ref.__gxx_personality_v0")  # as in mangled names
    weak = [line for line in symbols.stdout.splitlines() if re.search(r" W ", line)]
    shared = [line for line in weak if not any(name in line.split()[-1] for name in own)]
    assert not shared, "declare these MAXMOE_INLINE or move them into MAXMOE_ISA_NAMESPACE:\n" + "\n".join(shared)


@pytest.mark.parametrize("isa", by_default(ISAS, [BEST]))
def test_benchmarks(build_folder: Path, isa: str) -> None:
    """Every kernel has a row with its time, and one with the time of its bound."""
    headers = [path.read_text() for path in (ROOT / "cpp/kernels").rglob("*.h")]
    kernels = {name for text in headers for name in re.findall(r"^MAXMOE_KERNEL\((\w+),", text, re.MULTILINE)}
    options = ["--rounds", "1", "--threads", "2", "--filter", "(T 16|R 128),"]
    done = run(str(build_folder / "cpp/benchmarks/maxmoe_kernels_benchmarks"), *options, MAXMOE_ISA=isa)
    assert done.returncode == 0, done.stdout
    cells = [re.split("  +", line) for line in done.stdout.splitlines()[3:]]
    times = {(kernel, contender): float(best) for kernel, _, _, contender, best, *_ in cells}
    assert {kernel for kernel, contender in times if contender == "maxmoe"} == kernels
    assert {kernel for kernel, contender in times if contender.startswith("bound: ")} == kernels
    assert min(times.values()) > 0
