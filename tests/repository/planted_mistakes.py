"""Plants mistakes in a copy of the sources, one at a time, and prints the test that finds each.

    python tests/repository/planted_mistakes.py --json before.json
    python tests/repository/planted_mistakes.py --tree ../other --whole --only ties-to-odd-codes

The mistakes are in planted_mistakes.yaml. For each, the tests that are named there run, selected as by default, until
one fails; if none does, with --whole all tests. The tests that have found mistakes must pass without them. Two runs,
before and after a change of the tests, show whether the tests still find the same mistakes.

The copy is kept in the folder for temporary files, so that only changed files are compiled again. After a mistake in
C++, the build folder is restored.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".yaml")
FOLDER = Path(tempfile.gettempdir()) / "maxmoe_planted_mistakes"
# The kernels for this machine alone, and small translation units.
BUILD_OPTIONS = "-DMAXMOE_ISAS=native -DMAXMOE_UNITY_BATCH_SIZE=2"


@dataclass(frozen=True)
class Replacement:
    """A text that a mistake replaces in a file.

    Args:
        name: name of the mistake.
        file: file of the sources.
        right: text that is in the file once.
        wrong: text in its place.
    """

    name: str
    file: str
    right: str
    wrong: str


Replacements = TypeVar("Replacements", bound=Replacement)


@dataclass(frozen=True)
class Mistake(Replacement):
    """A mistake.

    Args:
        tests: files or folders with tests that should find it.
    """

    tests: list[str]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a mistake: the test that has found it, or "", and the time in seconds."""

    name: str
    file: str
    found_by: str
    seconds: float


def mistakes() -> list[Mistake]:
    """Return the table of mistakes."""
    return [Mistake(**entry) for entry in yaml.safe_load(TABLE.read_text())]


def misplaced(folder: Path, planted: Sequence[Replacement]) -> list[str]:
    """Return a message for each mistake whose right text is not exactly once in its file of the folder."""
    found = []
    for mistake in planted:
        path = folder / mistake.file
        count = path.read_text().count(mistake.right) if path.is_file() else 0
        if count != 1:
            found.append(f"{mistake.name}: {mistake.file} must have the text once, got {count} times: {mistake.right}")
    return found


def problems(tree: Path, planted: Sequence[Mistake]) -> list[str]:
    """Return a message for each mistake that cannot be planted in a tree, or whose tests are not there."""
    found = misplaced(tree, planted)
    for mistake in planted:
        if not any((tree / test).exists() for test in mistake.tests):
            found.append(f"{mistake.name}: none of {mistake.tests} is there")
    return found


class Copy:
    """A copy of a checkout in which mistakes are planted."""

    def __init__(self, tree: Path, folder: Path = FOLDER) -> None:
        self.folder, self._build, self._saved = folder, folder / "build", folder / "saved"
        self._is_compiled = False
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=tree, check=True, capture_output=True, text=True).stdout.split("\0")
        names += [str(path.relative_to(tree)) for path in (tree / "maxmoe").rglob("*.so")]
        files = {name for name in names if name and os.path.lexists(tree / name)}
        for path in [*folder.rglob("*")]:
            is_source = "__pycache__" not in path.parts and not {self._build, self._saved} & {path, *path.parents}
            if is_source and not path.is_dir() and str(path.relative_to(folder)) not in files:
                path.unlink()
        for name in files:
            _update(tree / name, folder / name)
        time.sleep(1)  # Python compares the times of sources in whole seconds

    @contextlib.contextmanager
    def planted(self, mistake: Mistake) -> Iterator[None]:
        """Plant a mistake while the block runs."""
        is_compiled = mistake.file.startswith("cpp/")
        if is_compiled and not self._is_compiled:
            self._compile()
            self._is_compiled = True
        path = self.folder / mistake.file
        text, status = path.read_text(), path.stat()
        path.write_text(text.replace(mistake.right, mistake.wrong))
        try:
            with self._compiled_again() if is_compiled else contextlib.nullcontext():
                yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    @contextlib.contextmanager
    def _compiled_again(self) -> Iterator[None]:
        package = self.folder / "maxmoe"
        shutil.rmtree(self._saved, ignore_errors=True)
        shutil.copytree(self._build, self._saved / "build")
        libraries = [path.relative_to(package) for path in package.rglob("*.so")]
        for library in libraries:
            (self._saved / library).parent.mkdir(exist_ok=True)
            shutil.copy2(package / library, self._saved / library)
        try:
            self._compile()
            yield
        finally:
            shutil.rmtree(self._build)
            (self._saved / "build").rename(self._build)
            for library in libraries:
                shutil.copy2(self._saved / library, package / library)

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
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, cwd=self.folder, env=variables, text=True, errors="replace", **output)


def _update(source: Path, target: Path) -> None:
    """Make a file equal to another one; an equal one keeps its time, so that it is not compiled again."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.unlink(missing_ok=True)
        target.symlink_to(os.readlink(source))
    elif not target.is_file() or target.read_bytes() != source.read_bytes():
        shutil.copyfile(source, target)


def plant(copy: Copy, mistake: Mistake, *, whole: bool) -> Outcome:
    """Plant a mistake and run tests until one of them finds it."""
    begin = time.monotonic()
    named = [test for test in mistake.tests if (copy.folder / test).exists()]
    with copy.planted(mistake):
        found = copy.failing("-x", *named) or (copy.failing("-x") if whole else [])
    return Outcome(mistake.name, mistake.file, found[0] if found else "", round(time.monotonic() - begin, 1))


def failing_without_mistakes(copy: Copy, outcomes: Sequence[Outcome]) -> set[str]:
    """Return the tests that found a mistake but fail without one as well."""
    tests = sorted({outcome.found_by for outcome in outcomes if outcome.found_by.startswith("tests/")})
    return set(copy.failing(*tests)) if tests else set()


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each mistake, those that no test has found last."""
    rows = sorted(outcomes, key=lambda outcome: not outcome.found_by)
    width = max((len(outcome.name) for outcome in rows), default=0)
    lines = [f"{row.name:{width}}  {row.seconds:6.1f} s  {row.found_by or 'NOT FOUND, in ' + row.file}" for row in rows]
    return "\n".join([*lines, f"{sum(bool(row.found_by) for row in rows)} of {len(rows)} mistakes found"])


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --only, for `choose`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mistakes")
    return parser


def choose(
    table: Sequence[Replacements], parser: argparse.ArgumentParser, options: argparse.Namespace
) -> list[Replacements]:
    """Return the mistakes that --only names, or all without it."""
    if unknown := {*(options.only or ())} - {mistake.name for mistake in table}:
        parser.error(f"unknown mistakes: {', '.join(sorted(unknown))}")
    return [mistake for mistake in table if options.only is None or mistake.name in options.only]


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[Mistake]]:
    """Parse the command line; return the options and the chosen mistakes."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout with the tests and the sources")
    parser.add_argument("--whole", action="store_true", help="all tests, if the named ones do not find a mistake")
    parser.add_argument("--json", type=Path, help="file for the outcomes")
    options = parser.parse_args(arguments)
    return options, choose(mistakes(), parser, options)


def main() -> int:
    """Plant the mistakes, print and write the outcomes; return whether not all are found."""
    options, chosen = parse_arguments()
    if found := problems(options.tree, chosen):
        raise SystemExit("\n".join(found))
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, a shell has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    FOLDER.mkdir(exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        copy, outcomes = Copy(options.tree.resolve()), []
        with contextlib.suppress(KeyboardInterrupt), tqdm(chosen, unit="mistake") as progress:
            for mistake in progress:
                progress.set_postfix_str(mistake.name)
                outcomes.append(plant(copy, mistake, whole=options.whole))
                if options.json is not None:
                    options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
        print(table(outcomes))
        if also := failing_without_mistakes(copy, outcomes):
            raise SystemExit("\n".join(["These tests fail without a mistake as well:", *sorted(also)]))
    return int(sum(bool(outcome.found_by) for outcome in outcomes) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
