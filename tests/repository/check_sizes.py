"""Complains about long files and long functions; `make lint` runs it.

Functions are counted without their docstring; functions of C++ begin and end in column 0.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = {".py": 50, ".cpp": 80, ".h": 80, ".cu": 80}


def files() -> Iterator[Path]:
    for folder in ("maxmoe", "tests", "examples", "benchmarks", "cpp"):
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in MAX_FUNCTION_LINES)


def python_functions(text: str) -> Iterator[tuple[int, int]]:
    """Line and number of lines of every function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.lineno, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def cpp_functions(text: str) -> Iterator[tuple[int, int]]:
    """Line and number of lines of everything that begins with a letter and ends with a brace in column 0."""
    begin = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match("[A-Za-z_]", line):
            begin = number
        elif line == "}":
            yield begin, number - begin + 1


def complaints(path: Path) -> Iterator[str]:
    text, name, limit = path.read_text(), path.relative_to(ROOT), MAX_FUNCTION_LINES[path.suffix]
    if (lines := len(text.splitlines())) > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, the limit for a file is {MAX_FILE_LINES}"
    for begin, lines in python_functions(text) if path.suffix == ".py" else cpp_functions(text):
        if lines > limit:
            yield f"{name}:{begin}: a function of {lines} lines, the limit is {limit}"


if __name__ == "__main__":
    found = [complaint for path in files() for complaint in complaints(path)]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
