"""Where a source of maxmoe/ is tested: tests/<folder>/test_<file>.py, and the files that tests/tests_of.yaml names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def table() -> dict[str, list[str]]:
    """Return tests_of.yaml: the test files of each source beside the one of its name."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "tests/tests_of.yaml").read_text()) or {}
    return {source: [files] if isinstance(files, str) else files for source, files in found.items()}


def test_of_its_name(source: str) -> str | None:
    """Return the test file of a source's name, in its folder of tests/ or one above; package/ is of maxmoe/ itself."""
    path = Path(source).relative_to("maxmoe")
    folders = [*path.parents[:-1]] or [Path("package")]
    files = (Path("tests", folder, f"test_{path.stem.lstrip('_')}.py") for folder in folders)
    return next((file.as_posix() for file in files if (ROOT / file).is_file()), None)


def tests_of(source: str) -> list[str]:
    """Return the test files of a source."""
    named = test_of_its_name(source)
    return ([named] if named else []) + table().get(source, [])


def sources() -> Iterator[str]:
    """Return the sources, without files __init__ and __main__ that define nothing."""
    for path in sorted((ROOT / "maxmoe").rglob("*.py")):
        if not path.stem.startswith("__") or re.search(r"^(def|class) ", path.read_text(), re.MULTILINE):
            yield path.relative_to(ROOT).as_posix()


def complaints() -> Iterator[str]:
    """Return a message for each source without tests, and for each wrong line of tests_of.yaml."""
    lines = table()
    for source in sources():
        if source not in lines and test_of_its_name(source) is None:
            yield f"{source} has no test of its name, and no line in tests_of.yaml"
    for source, files in lines.items():
        if not (ROOT / source).is_file():
            yield f"{source}, which tests_of.yaml names, does not exist"
        elif (named := test_of_its_name(source)) in files:
            yield f"tests_of.yaml need not name {named} for {source}, which has its name"
        if missing := [file for file in files if not (ROOT / file).is_file()] or not files:
            yield f"tests_of.yaml names {missing} for {source}, which does not exist"
