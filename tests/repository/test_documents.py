"""README.md, CONTRIBUTING.md and docs: the Python runs, the commands exist, the names are right."""

import importlib.util
import re
import shlex
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from fuzz.run import FUZZERS
from maxmoe.cli.main import parse_options
from repository.check_packages import TORCH_REQUIREMENT, TORCHES, tracked

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GETTING_STARTED, MINIMAL = ROOT / "docs" / "getting_started.md", ROOT / "examples" / "train_minimal.py"
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
(VENV,) = re.findall(r"^environment = (\.\w+)", (ROOT / "Makefile").read_text(), re.MULTILINE)


def blocks(language: str, documents: Iterable[Path] = DOCUMENTS) -> list[str]:
    """The code blocks of one language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return [block for path in documents for block in re.findall(pattern, path.read_text(), re.DOTALL | re.MULTILINE)]


def is_part(code: str, script: str) -> bool:
    """Whether these are consecutive lines of a script, apart from a common indentation."""
    count, lines = code.count("\n"), script.splitlines(keepends=True)
    return any(textwrap.dedent("".join(lines[i : i + count])) == code for i in range(len(lines) - count + 1))


# Parts of scripts that are run elsewhere; every other block of Python is executed here.
SHOWN = [code for code in blocks("python", [GETTING_STARTED]) if is_part(code, MINIMAL.read_text())]
RUN_BY_EXAMPLES = blocks("python", [ROOT / "docs" / "how_to" / "own_model.md"])


def commands() -> list[list[str]]:
    """The lines of all shell blocks, in words, without comments."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_block_has_a_language_that_is_checked() -> None:
    fences = [line for path in DOCUMENTS for line in path.read_text().splitlines() if line.startswith("```")]
    assert set(fences) == {"```", "```python", "```sh", "```text", "```yaml"}
    for block in blocks("yaml"):
        assert yaml.safe_load(block)


def test_getting_started_shows_the_script() -> None:
    first, *others = blocks("python", [GETTING_STARTED])
    assert others == SHOWN and len(SHOWN) == 5 and "import torch" in first
    assert not is_part("dist.init_process_group()\n", MINIMAL.read_text())


@pytest.mark.parametrize("code", [code for code in blocks("python") if code not in [*SHOWN, *RUN_BY_EXAMPLES]])
# Of libraries about themselves and about torch.
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_python_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    for library in ("lightning", "trl", "torch.utils.tensorboard", "wandb"):  # of the extra "trainers"
        if re.search(rf"^(import|from) {library}\b", code, re.MULTILINE):
            pytest.importorskip(library)
    exec(compile(code, "document", "exec"), {})
    assert capsys.readouterr().out.count("\n") >= code.count("print(")


def check_script(script: str, arguments: list[str]) -> None:
    """The options of a script exist; its module is imported by the name of its file."""
    assert (ROOT / script).exists()
    if script == "examples/train_minimal.py":
        assert not arguments
    elif script == "tests/fuzz/run.py":
        fuzzer, *options = arguments
        assert fuzzer in FUZZERS and set(options[::2]) <= {"--seconds", "--seed", "--case"}
    else:
        for library in ("transformers", "peft"):
            if library in (ROOT / script).read_text():
                pytest.importorskip(library)
        folder = f"{Path(script).parts[1]}." * script.startswith("tests/")
        module = importlib.import_module(folder + Path(script).stem)
        (module.parse_arguments if folder else module.parse_options)(arguments)


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_exist(words: list[str]) -> None:
    match words:
        case ["make", target, *options]:
            known = {f"TORCH={release}" for release in TORCHES} | ({'ARGS=-m ""'} if target == "test" else set())
            assert target in TARGETS and set(options) <= known
        case ["pip", "install", *arguments] | [
            "MAXMOE_CORE=off" | "MAXMOE_CUDA=on", "pip", "install", *arguments
        ]:  # fmt: skip
            check_pip(arguments)
        case ["source", activate]:
            assert activate == f"{VENV}/bin/activate"
        case ["python", "-m", "pytest", "-m", "", *files] | ["python", "-m", "pytest", *files]:
            assert all((ROOT / file).exists() for file in files)
        case ["torchrun", "--nproc-per-node", "2" | "4", "train.py"]:  # the reader's script
            pass
        case ["python", "-m", benchmark, *_] if benchmark.startswith("benchmarks."):
            assert importlib.util.find_spec(benchmark)
        case ["python", "-m", "maxmoe", *arguments]:
            parse_options(arguments)
        case ["bash", "tests/device/run.sh", *options]:
            assert options in ([], ["--device", "cpu", "--tiny"])
        case ["python", "examples/notebooks/execute.py", *names]:
            assert all((ROOT / f"examples/notebooks/{name}.ipynb").exists() for name in names)
        case ["python", script, *arguments] | ["torchrun", "--nproc-per-node", _, script, *arguments]:
            check_script(script, arguments)
        case _:
            pytest.fail(f"nothing here checks {words}")


def test_the_address_of_the_repository_is_in_one_place() -> None:
    """In pyproject.toml, once there is one."""
    files = [path for path in tracked() if (ROOT / path).is_file()]
    named = {path for path in files if re.search(rb"git(hub|lab)\.com/[\w-]+/maxmoe\b", (ROOT / path).read_bytes())}
    assert "README.md" in files and named <= {"pyproject.toml"}


def check_pip(arguments: list[str]) -> None:
    """The documented packages are the ones in pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text()
    for argument in arguments:
        if argument.startswith(".["):
            for extra in argument[2:-1].split(","):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
        elif not argument.startswith(("-", "https://")) and argument not in (".", "dist/*.whl"):
            assert argument == TORCH_REQUIREMENT or f'"{argument}"' in project, argument


def test_layout_names_what_exists() -> None:
    for block in blocks("text", DOCUMENTS[1:2]):
        for line in block.splitlines():
            assert (ROOT / line.split()[0]).exists(), line
    for path in re.findall(r"`((?:maxmoe|cpp|tests|examples|benchmarks)/[\w./]+)`", DOCUMENTS[1].read_text()):
        file = re.sub(r"(?<![a-z])x(?=\.)", "ragged_dot", path)
        assert (ROOT / file).exists(), path


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)(.*?)\)", path.read_text()):
        assert (path.parent / target.partition("#")[0]).exists(), target
