"""Builds the GoogleTest suite of the kernels (cpp/tests) and runs it with every instruction set there is."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import maxmoe

ROOT = Path(__file__).parent.parent
ISAS = maxmoe.build_info()["supported_isas"]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    return subprocess.run(
        command,
        env=os.environ | {"PATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def build_step(*command: str) -> None:
    done = run(*command)
    if done.returncode != 0:
        lines = done.stdout.splitlines()
        first = next((i for i, line in enumerate(lines) if re.search("error|FAILED", line, re.IGNORECASE)), 0)
        pytest.fail("\n".join([f"$ {' '.join(command)}", *lines[first : first + 60]]), pytrace=False)


@pytest.fixture(scope="module")
def build_folder() -> Path:
    folder = ROOT / "build" / f"tests-{sys.implementation.cache_tag}"
    build_step(
        *("cmake", "-S", str(ROOT), "-B", str(folder), "-GNinja", f"-DPython_EXECUTABLE={sys.executable}"),
        *("-DMAXMOE_BUILD_PYTHON=OFF", "-DMAXMOE_BUILD_TESTS=ON"),
    )
    build_step("cmake", "--build", str(folder))
    return folder


@pytest.mark.parametrize("isa", ISAS)
def test_kernels(build_folder: Path, isa: str) -> None:
    done = run("ctest", "--test-dir", str(build_folder), "--no-tests=error", "--output-on-failure", MAXMOE_ISA=isa)
    if done.returncode != 0:
        failed = [line for line in done.stdout.splitlines() if not re.search(r"^ +Start |Passed", line)]
        pytest.fail("\n".join([f"ctest with MAXMOE_ISA={isa}", *failed[-200:]]), pytrace=False)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512bf16"])
def test_instruction_sets_share_no_code(build_folder: Path, isa: str) -> None:
    """Of a weak symbol the linker keeps one definition: none may come out of two instruction sets."""
    objects = sorted(build_folder.glob(f"CMakeFiles/maxmoe_kernels_{isa}.dir/**/*.o"))
    if not objects:
        pytest.skip(f"this build has no kernels for {isa}")
    symbols = run("nm", "--print-file-name", *map(str, objects))
    assert symbols.returncode == 0, symbols.stdout
    own = (f"{len(isa)}{isa}", f"Eigen_{isa}", "DW.ref.__gxx_personality_v0")  # as in mangled names
    weak = [line for line in symbols.stdout.splitlines() if re.search(r" [VWu] ", line)]
    shared = [line for line in weak if not any(name in line.split()[-1] for name in own)]
    assert not shared, "declare these MAXMOE_INLINE or move them into MAXMOE_ISA_NAMESPACE:\n" + "\n".join(shared)
