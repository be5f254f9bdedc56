"""The C++ core: its build information, the choice of an instruction set, errors of a wrong build and of none."""

import os
import re
import runpy
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

ROOT = Path(__file__).parents[2]
PACKAGE = Path(maxmoe.__file__).parent
INFO = maxmoe.build_info()
MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_build_info() -> None:
    assert INFO["torch"].split("+")[0].split(".")[:2] == torch.__version__.split("+")[0].split(".")[:2]
    assert maxmoe.__version__ == INFO["version"]
    assert Path(INFO["core"]).parent == PACKAGE / f"torch{MAJOR}.{MINOR}"
    assert f'version = "{INFO["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert re.fullmatch(r"(gcc|clang) \d+.*", INFO["compiler"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", INFO["eigen"])
    assert INFO["openmp"] >= 201511  # without OpenMP at::parallel_for is serial
    assert INFO["supported_isas"][0] == "baseline"
    assert INFO["isa"] in INFO["supported_isas"]
    assert INFO["second_level_cache_bytes"] >= 2**16


# Imports the core with an unknown instruction set, prints the error message, and imports it with the given one.
CHOOSE_ISA = """
import os
import sys

try:
    import maxmoe.ops
except ImportError as error:
    print(error)
os.environ["MAXMOE_ISA"] = sys.argv[1]
import maxmoe.ops

print(maxmoe.build_info()["isa"])
"""


@pytest.mark.parametrize("isa", by_default(INFO["supported_isas"], ["baseline"]))
def test_environment_variable_lowers_the_isa_and_an_unknown_one_is_an_error(isa: str) -> None:
    done = programs.python(CHOOSE_ISA, isa, env=os.environ | {"MAXMOE_ISA": "sse"})
    message, chosen = programs.printed(done).splitlines()
    assert message.startswith("MAXMOE_ISA must be one of")
    assert f"({', '.join(INFO['supported_isas'])}), got 'sse'" in message
    assert chosen == isa


def core_error(folder: Path) -> str:
    """The error of a copy of maxmoe/_C.py in another folder."""
    path = shutil.copy(PACKAGE / "_C.py", folder)
    with pytest.raises(ImportError) as error:
        runpy.run_path(str(path))
    return str(error.value)


def test_missing_core_says_how_to_build(tmp_path: Path) -> None:
    message = core_error(tmp_path)
    assert "need its C++ core, which is not built" in message and "MAXMOE_CORE=off" in message
    assert "pip install --no-build-isolation -e ." in message


SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def module_file(package: Path, torch_minor: str, suffix: str = SUFFIX) -> Path:
    folder = package / f"torch{torch_minor}"
    folder.mkdir(exist_ok=True)
    return folder / f"_C{suffix}"


@pytest.mark.parametrize("is_wheel", [True, False], ids=["wheel", "sources"])
def test_another_torch_gives_the_commands_that_help(tmp_path: Path, is_wheel: bool) -> None:
    package = tmp_path / "maxmoe"
    package.mkdir()
    for minor in ("2.9", "2.10", "2.1", f"{MAJOR}.{MINOR}1"):
        module_file(package, minor).touch()
    if not is_wheel:
        (tmp_path / "setup.py").touch()
    message = core_error(package)
    sources = "the folder of its sources" if is_wheel else tmp_path
    assert message == (
        f"maxmoe was built for torch 2.1, 2.9, 2.10, {MAJOR}.{MINOR}1, but torch {torch.__version__} is "
        f"running. Build it for this torch, in {sources}: "
        "pip install --no-build-isolation -e . (or take a torch that it was built for: "
        f"pip install 'torch=={MAJOR}.{MINOR}1.*')"
    )


def test_another_python_is_named(tmp_path: Path) -> None:
    for suffix in (".cpython-38-x86_64-linux-gnu.so", ".cpython-399t-x86_64-linux-gnu.so"):
        module_file(tmp_path, f"{MAJOR}.{MINOR}", suffix).touch()
    version = "{}.{}".format(*sys.version_info)
    assert core_error(tmp_path) == (
        "maxmoe was built for CPython 3.8, CPython 3.99 without the global interpreter lock, but CPython "
        f"{version} is running. Build it for this Python, in the folder of its sources: "
        "pip install --no-build-isolation -e ."
    )


def test_another_torch_is_named_before_anything_of_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '2.99.0'\n")
    done = programs.python("import maxmoe; maxmoe.MoE", env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert error_line(done).startswith("ImportError: maxmoe was built for torch 2.")
    assert "but torch 2.99.0 is running" in error_line(done)


def test_a_broken_core_is_an_import_error_with_its_path(tmp_path: Path) -> None:
    path = module_file(tmp_path, f"{MAJOR}.{MINOR}")
    path.touch()
    assert core_error(tmp_path) == f"the C++ core of maxmoe cannot be loaded: {path}: file too short"


def test_sub_interpreters_are_refused_before_torch_is_imported() -> None:
    """torch 2.13 does not return from its import there."""
    interpreters = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    code = f"import {interpreters} as i; print(i.run_string(i.create(), 'import maxmoe._C'))"
    done = programs.python(code)
    assert "maxmoe cannot be imported in a sub-interpreter" in done.stdout + done.stderr


# Without the core: `maxmoe.testing` needs no compiled operators


@pytest.mark.slow
def test_the_comparison_of_ranks() -> None:
    files = [f"tests/testing/test_{name}.py" for name in ("training_runs", "batches")]
    # Processes with equal gradients and with a mistake, batches.
    tests = "starts_processes or batches_of_any_form"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests, *files]
    text = programs.printed(programs.run(command, cwd=ROOT, env=os.environ | {"MAXMOE_CORE": "off"}))
    assert " passed" in text


OFF = "layers and operators of maxmoe need its C++ core, got MAXMOE_CORE=off in the environment"
WITHOUT_CORE = """
import runpy, sys
import maxmoe
maxmoe.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=8, top_k=2)
maxmoe.sharding.LogicalRules.load("ep-tp")
print(maxmoe.build_info())
for command in ("plan", "explain", "estimate", "info"):
    sys.argv = ["maxmoe", command]
    try:
        runpy.run_module("maxmoe", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(command, end.code, flush=True)
maxmoe.MoE
"""


def test_layers_and_commands_say_what_is_missing() -> None:
    done = programs.python(WITHOUT_CORE, env=os.environ | {"MAXMOE_CORE": "off"})
    info, *ends = done.stdout.splitlines()
    assert info == f"{ {'core': OFF, 'version': maxmoe.__version__} }"
    assert ends[:3] == ["plan 2", "explain 2", "estimate 2"] and ends[-1] in ("info 0", "info None")
    assert ["core", OFF] in [line.split(maxsplit=1) for line in ends]
    errors = done.stderr.splitlines()
    assert errors[:3] == [f"error: {OFF}"] * 3 and errors[-1] == f"ImportError: {OFF}"
    assert errors[3].startswith("Traceback")
