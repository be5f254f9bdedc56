"""The C++ core: what it says about itself, choosing an instruction set, and the errors of a wrong build."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import maxmoe

ROOT = Path(__file__).parents[1]
PACKAGE = Path(maxmoe.__file__).parent
INFO = maxmoe.build_info()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_build_info() -> None:
    assert INFO["torch"].split("+")[0].split(".")[:2] == torch.__version__.split("+")[0].split(".")[:2]
    assert maxmoe.__version__ == INFO["version"]
    assert f'version = "{INFO["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert re.fullmatch(r"(gcc|clang) \d+.*", INFO["compiler"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", INFO["eigen"])
    assert INFO["openmp"] >= 201511  # without OpenMP at::parallel_for is serial
    assert INFO["supported_isas"][0] == "baseline"
    assert INFO["isa"] in INFO["supported_isas"]


@pytest.mark.parametrize("isa", INFO["supported_isas"])
def test_environment_variable_lowers_the_isa(isa: str) -> None:
    done = python("import maxmoe; print(maxmoe.build_info()['isa'])", MAXMOE_ISA=isa)
    assert done.stdout.strip() == isa, done.stderr


@pytest.mark.parametrize(
    "isa", ["sse", *sorted({"baseline", "avx2", "avx512", "avx512bf16"} - set(INFO["supported_isas"]))]
)
def test_unsupported_isa_says_what_is_possible(isa: str) -> None:
    message = error_line(python("import maxmoe", MAXMOE_ISA=isa))
    assert message.startswith("ImportError: MAXMOE_ISA must be one of")
    assert f"({', '.join(INFO['supported_isas'])}), got '{isa}'" in message


def copied_library(folder: Path) -> str:
    """Code that runs a copy of maxmoe/_library.py in a folder of its own."""
    shutil.copy(PACKAGE / "_library.py", folder)
    return f"import runpy; runpy.run_path({str(folder / '_library.py')!r})"


def test_missing_core_says_how_to_build(tmp_path: Path) -> None:
    message = error_line(python(copied_library(tmp_path)))
    assert message.startswith("ImportError: the C++ core of maxmoe is not built")
    assert "pip install --no-build-isolation -e ." in message


@pytest.mark.parametrize("built", ["2.9.1+cpu", "2.1.0"])
def test_wrong_torch_gives_the_command_that_mends_it(tmp_path: Path, built: str) -> None:
    (tmp_path / "_torch_version.txt").write_text(f"{built}\n")
    message = error_line(python(copied_library(tmp_path)))
    assert message.startswith(f"ImportError: maxmoe was built against torch {built}, but torch {torch.__version__}")
    assert "pip install --no-build-isolation -e ." in message
    assert f"pip install torch=={built.split('+')[0]})" in message


def test_a_patch_release_of_torch_is_no_other_torch(tmp_path: Path) -> None:
    major, minor = torch.__version__.split(".")[:2]
    (tmp_path / "_torch_version.txt").write_text(f"{major}.{minor}.99+cu999\n")
    done = python(copied_library(tmp_path))
    assert done.returncode == 0, done.stderr
