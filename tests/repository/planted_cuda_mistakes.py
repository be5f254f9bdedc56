"""Plants mistakes in the CUDA kernels, one at a time, and prints the test that finds each in the emulator.

    python tests/repository/planted_cuda_mistakes.py
    python tests/repository/planted_cuda_mistakes.py --only no-barrier-after-the-wait

The mistakes are in planted_cuda_mistakes.yaml. The tests of the kernel run without sanitizers first; if they find
nothing, with the address and undefined-behaviour sanitizers. They must pass without a mistake. The exit status is 0 if
all mistakes are found. Only the kernel is compiled again, not the operators, unlike by planted_mistakes.py.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

from repository import planted_mistakes  # noqa: E402
from repository.planted_mistakes import chosen, parser_of  # noqa: E402

FOLDER = ROOT / "cpp/cuda"
TABLE = Path(__file__).with_suffix(".yaml")
SANITIZERS = {"plain": [], "sanitized": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]}
STARTS = {"ragged_scatter_add": ["ragged_plan"]}  # kernels that another kernel launches
MAX_SECONDS = 300.0


@dataclass(frozen=True)
class Mistake(planted_mistakes.Mistake):
    """A mistake in a source of the CUDA kernels.

    Args:
        kernel: kernel whose tests should find it.
    """

    kernel: str = ""


def mistakes() -> list[Mistake]:
    """Return the table of mistakes."""
    return planted_mistakes.mistakes(TABLE, Mistake)


class Tests:
    """The tests of a kernel, built in a folder; the objects of the tests and of other kernels are compiled once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _compile(self, source: Path, target: Path, sanitizer: str, *includes: Path) -> None:
        paths = [*includes, ROOT / "cpp", ROOT / "cpp/tests", FOLDER / "tests"]
        flags = ["-std=c++20", "-O1", "-w", *SANITIZERS[sanitizer], *(f"-I{path}" for path in paths)]
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, *flags, "-xc++", "-c", str(source), "-o", str(target)], check=True)

    def _object(self, source: Path, sanitizer: str) -> Path:
        return self.folder / f"{source.stem}_{sanitizer}.o"

    def complaint(self, kernel: str, mistake: Mistake | None, sanitizer: str) -> str:
        """Return the failures of the tests of a kernel with a mistake, or "" if they pass."""
        sources = self.folder / "sources"
        others = [FOLDER / f"tests/test_{kernel}.cpp", *(FOLDER / f"{other}.cu" for other in STARTS.get(kernel, []))]
        for other in others:
            if not self._object(other, sanitizer).exists():
                self._compile(other, self._object(other, sanitizer), sanitizer)
        shutil.rmtree(sources, ignore_errors=True)
        source = FOLDER / f"{kernel}.cu"
        if mistake is not None:
            planted = sources / os.path.relpath(ROOT / mistake.file, ROOT / "cpp")
            planted.parent.mkdir(parents=True)
            planted.write_text(mistake.planted())
            source = planted if planted.name == source.name else source
        self._compile(source, self.folder / "kernel.o", sanitizer, sources)
        program = self.folder / "tests"
        objects = [str(self.folder / "kernel.o"), *(str(self._object(other, sanitizer)) for other in others)]
        libraries = [*SANITIZERS[sanitizer], "-lgtest_main", "-lgtest", "-lpthread"]
        subprocess.run([os.environ.get("CXX", "c++"), *objects, *libraries, "-o", str(program)], check=True)
        return self._run(program)

    def _run(self, program: Path) -> str:
        command = [str(program), "--gtest_brief=1", "--gtest_fail_fast"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS, errors="replace")
        except subprocess.TimeoutExpired:
            return f"no end after {MAX_SECONDS:.0f} s"
        if done.returncode == 0:
            return ""
        output = done.stdout + done.stderr
        found = re.search(r"ERROR: (AddressSanitizer: \S+)|(runtime error: .*)|\[  FAILED  \] (\S+)", output)
        return next(filter(None, found.groups())) if found else f"exit status {done.returncode}"


def found_by(tests: Tests, mistake: Mistake) -> str:
    """Return the tests that find a mistake, or ""."""
    for sanitizer in SANITIZERS:
        if complaint := tests.complaint(mistake.kernel, mistake, sanitizer):
            return f"{sanitizer}: {complaint}"
    return ""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    return parser_of(__doc__).parse_args(arguments)


def main() -> int:
    """Plant the mistakes, print the tests that find each, return whether one is not found."""
    table, missed = chosen(mistakes(), parse_arguments().only), 0
    with tempfile.TemporaryDirectory() as name:
        tests = Tests(Path(name))
        for kernel in sorted({mistake.kernel for mistake in table}):
            if complaint := tests.complaint(kernel, None, "plain"):
                raise SystemExit(f"the tests of {kernel} fail without a mistake: {complaint}")
        for mistake in table:
            finder = found_by(tests, mistake)
            missed += not finder
            print(f"{mistake.name:60} {finder or 'NOT FOUND'}", flush=True)
    print(f"{len(table) - missed} of {len(table)} mistakes found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
