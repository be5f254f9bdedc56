"""Plants mistakes in a copy of the sources, one at a time, and prints the test that finds each.

    python tests/repository/planted_mistakes.py
    python tests/repository/planted_mistakes.py --whole --only ties-to-odd-codes

The mistakes are in planted_mistakes.yaml. For each, tests run as by default until one fails: those of the source
(tests_of.py), then those of its folder and, with --whole, all. The tests that have found mistakes must pass without
them. The output before and after a change of the tests shows whether they still find the same mistakes.

The copy is kept in the folder for temporary files, so that only changed files are compiled again. After a mistake in
C++, the build is restored.
"""

import argparse
import ast
import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".yaml")
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

from repository.tests_of import tests_of  # noqa: E402

FOLDER = Path(tempfile.gettempdir(), f"maxmoe_planted_mistakes_{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}")
# The kernels for this machine alone, and small translation units.
BUILD_OPTIONS = "-DMAXMOE_ISAS=native -DMAXMOE_UNITY_BATCH_SIZE=2"


@dataclass(frozen=True)
class Mistake:
    """A text that is replaced at one place of the sources.

    Args:
        name: name of the mistake.
        where: qualified name of a function, class or module, or a file in cpp/.
        right: text that is there once, with any white space where it has some.
        wrong: text in its place.
        tests: files with tests of a C++ source.
    """

    name: str
    where: str
    right: str
    wrong: str
    tests: Sequence[str] = ()

    @property
    def file(self) -> str:
        """The file of the mistake."""
        return self._place()[0]

    def _place(self) -> tuple[str, list[str]]:
        """Return the file, and the names of the classes and functions in it that lead to the place."""
        parts = self.where.split(".")
        for count in range(len(parts), 0, -1):
            for file in ("/".join(parts[:count]) + ".py", "/".join([*parts[:count], "__init__.py"])):
                if (ROOT / file).is_file():
                    return file, parts[count:]
        return self.where, []

    def planted(self) -> str:
        """Return the text of the file with the mistake; raise a ValueError if the right text is not there once."""
        file, names = self._place()
        text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        begin, end = _span(text, names) if names else (0, len(text))
        pattern = re.compile(r"\s+".join(map(re.escape, self.right.split())))
        found = [*pattern.finditer(text, begin, end)]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {self.where} must have the text once, got {len(found)}: {self.right}")
        return text[: found[0].start()] + self.wrong + text[found[0].end() :]


@functools.lru_cache(maxsize=16)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _span(text: str, names: Sequence[str]) -> tuple[int, int]:
    """Return where a class or function of a Python source begins and ends; (0, 0) if it is not there."""
    node: ast.AST | None = _tree(text)
    for name in names:
        scopes = (
            (child for child in ast.walk(node) if isinstance(child, ast.FunctionDef | ast.ClassDef)) if node else ()
        )
        node = next((scope for scope in scopes if scope.name == name and scope is not node), None)
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return 0, 0
    ends = [0, *(match.end() for match in re.finditer("\n|$", text))]
    first = min(part.lineno for part in (node, *node.decorator_list))
    return ends[first - 1], ends[node.end_lineno or first]


Planted = TypeVar("Planted", bound=Mistake)


def mistakes(table: Path = TABLE, kind: type = Mistake) -> list[Any]:
    """Return a table of mistakes of a kind."""
    return [kind(where=entry.pop("in"), **entry) for entry in yaml.safe_load(table.read_text())]


def problems(table: Sequence[Mistake]) -> list[str]:
    """Return a message for each mistake that cannot be planted."""
    found = []
    for mistake in table:
        try:
            mistake.planted()
        except ValueError as error:
            found.append(str(error))
    return found


class Copy:
    """A copy of the checkout in which mistakes are planted."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._is_compiled = False
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        names += [str(path.relative_to(ROOT)) for path in (ROOT / "maxmoe").rglob("*.so")]
        files = {name for name in names if (ROOT / name).is_file()}
        for path in folder.rglob("*"):
            name = str(path.relative_to(folder))
            if path.is_file() and not name.startswith("build/") and name not in files:
                path.unlink()
        for name in files:  # an equal file keeps its time, so that it is not compiled again
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_file() or target.read_bytes() != (ROOT / name).read_bytes():
                shutil.copyfile(ROOT / name, target)
        time.sleep(1)  # Python compares the times of sources in whole seconds

    @contextlib.contextmanager
    def planted(self, mistake: Mistake) -> Iterator[None]:
        """Plant a mistake while the block runs."""
        path = self.folder / mistake.file
        text, status = path.read_text(), path.stat()
        with self._build_restored() if mistake.file.startswith("cpp/") else contextlib.nullcontext():
            path.write_text(mistake.planted())
            try:
                if mistake.file.startswith("cpp/"):
                    self._compile()
                yield
            finally:
                path.write_text(text)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    @contextlib.contextmanager
    def _build_restored(self) -> Iterator[None]:
        if not self._is_compiled:
            self._compile()
            self._is_compiled = True
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as saved:
            for name in ("build", "maxmoe"):
                shutil.copytree(self.folder / name, Path(saved, name), symlinks=True)
            try:
                yield
            finally:
                for name in ("build", "maxmoe"):
                    shutil.rmtree(self.folder / name)
                    Path(saved, name).rename(self.folder / name)

    def _compile(self) -> None:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", "."]
        done = self._run(command, CMAKE_ARGS=BUILD_OPTIONS)
        if done.returncode:
            raise SystemExit(f"the C++ core cannot be compiled:\n{done.stdout[-4000:]}")

    def failing(self, *arguments: str) -> list[str]:
        """Run tests; return those that fail. A crash of the run counts as a test."""
        done = self._run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments])
        if done.returncode < 0:
            return [f"a crash by signal {-done.returncode} in {' '.join(arguments)}"]
        _, header, summary = done.stdout.rpartition("= short test summary info =")
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", summary, re.MULTILINE) if header else []
        if done.returncode > 2 or bool(done.returncode) != bool(failed):  # 2: a file of tests cannot be imported
            raise SystemExit(f"pytest cannot run, its status is {done.returncode}:\n{done.stdout[-4000:]}")
        return failed

    def _run(self, command: Sequence[str], **environment: str) -> "subprocess.CompletedProcess[str]":
        variables = os.environ | {"PYTHONPATH": str(self.folder)} | environment
        pipe, joined = subprocess.PIPE, subprocess.STDOUT
        return subprocess.run(
            command, cwd=self.folder, env=variables, text=True, errors="replace", stdout=pipe, stderr=joined
        )

    def finder(self, mistake: Mistake, *, whole: bool) -> str:
        """Return the first test that finds a mistake, or ""."""
        folder = Path("tests", Path(mistake.file).parts[1])
        runs = [mistake.tests or tests_of(mistake.file), [str(folder)] if (ROOT / folder).is_dir() else []]
        with self.planted(mistake):
            for tests in [*filter(None, runs), *([()] if whole else [])]:
                if found := self.failing("-x", *tests):
                    return found[0]
        return ""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --only, for `chosen`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mistakes")
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--whole", action="store_true", help="all tests, if those of the folder do not find a mistake")
    return parser.parse_args(arguments)


def chosen(table: Sequence[Planted], only: Sequence[str] | None) -> list[Planted]:
    """Return the mistakes that --only names, or all without it."""
    if unknown := {*(only or ())} - {mistake.name for mistake in table}:
        raise SystemExit(f"unknown mistakes: {', '.join(sorted(unknown))}")
    found = [mistake for mistake in table if only is None or mistake.name in only]
    if messages := problems(found):
        raise SystemExit("\n".join(messages))
    return found


def main() -> int:
    """Plant the mistakes, print the test that finds each; return whether one is not found."""
    options = parse_arguments()
    table: list[Mistake] = chosen(mistakes(), options.only)
    finders: list[str] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, a shell has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    FOLDER.mkdir(exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        copy = Copy()
        for mistake in table:
            finders.append(copy.finder(mistake, whole=options.whole))
            print(f"{mistake.name:60} {finders[-1] or 'NOT FOUND'}", flush=True)
        tests = sorted({finder for finder in finders if finder.startswith("tests/")})
        if also := copy.failing(*tests) if tests else []:
            raise SystemExit("\n".join(["These tests fail without a mistake as well:", *also]))
    print(f"{len(table) - finders.count('')} of {len(table)} mistakes found")
    return int("" in finders)


if __name__ == "__main__":
    sys.exit(main())
