"""The page docs/messages.md: every error message and warning of the package, read from its sources."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
FAILURES = "maxmoe/ranks/failures.py"
# Raised by scripts, and by __getattr__ for Python itself.
NOT_FOR_USERS = {"AttributeError", "argparse.ArgumentTypeError", "InputError"}


def messages() -> list[tuple[str, str]]:
    """Every message, with "..." for its values, and the file that raises it."""
    found = {
        (message, path.relative_to(ROOT).as_posix())
        for folder, pattern, read in (("maxmoe", "*.py", from_python), ("cpp/ops", "*.[ch]*", from_cpp))
        for path in sorted((ROOT / folder).rglob(pattern))
        for message in read(path.read_text())
    }
    found |= {(message, FAILURES) for message in from_failures((ROOT / FAILURES).read_text())}
    return sorted(found, key=lambda pair: (pair[1], pair[0]))


def from_python(text: str) -> Iterator[str]:
    """The messages of raised errors and of warnings."""
    tree = ast.parse(text)
    named: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name):
                named.setdefault(target.id, []).append(node.value)
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args or ast.unparse(call.func) in NOT_FOR_USERS:
            continue
        if not isinstance(node, ast.Raise) and ast.unparse(call.func) != "warnings.warn":
            continue
        argument = call.args[0]
        values = named.get(argument.id, []) if isinstance(argument, ast.Name) else [argument]
        yield from filter(says_something, map(written, values))
    yield from filter(says_something, map(written, returned_warnings(tree)))


def returned_warnings(tree: ast.Module) -> Iterator[ast.expr]:
    """The results of functions that return a warning, as their docstrings say."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (ast.get_docstring(node) or "").startswith("Return the warning"):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield inner.value


def from_failures(text: str) -> Iterator[str]:
    """What a RankError says of the rank that failed: put together from what several ranks saw."""
    for node in ast.walk(ast.parse(text)):
        message = written(node) if isinstance(node, ast.Constant | ast.JoinedStr) else ""
        is_part = message.endswith(" ")  # of another one
        if not is_part and re.match(r"failed first|died or hangs|hangs at|came to the end", message):
            yield f"rank ... of ... {message}"


def written(node: ast.expr) -> str:
    """A message with "..." for what is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(written(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return written(node.left) + written(node.right)
    return "..."


def from_cpp(text: str) -> Iterator[str]:
    """The messages of MAXMOE_CHECK(condition, op, ...) and of TORCH_CHECK_NOT_IMPLEMENTED(condition, ...)."""
    for macro, call in re.findall(r"(MAXMOE_CHECK|TORCH_CHECK_NOT_IMPLEMENTED)\((.*?)\);", text, re.DOTALL):
        parts = arguments(call)[2 if macro == "MAXMOE_CHECK" else 1 :]
        literals = ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', part)) for part in parts]
        message = re.sub(r"(\.\.\.)+", "...", "".join(literal or "..." for literal in literals))
        if says_something(message):
            yield message


def says_something(message: str) -> bool:
    """Whether two words are left without the values."""
    return len(re.findall("[A-Za-z]{2,}", message)) >= 2


def arguments(call: str) -> list[str]:
    """Split at the commas that are in no parentheses and no string."""
    found, depth = [""], 0
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|.', call, re.DOTALL):
        depth += (token in "([{") - (token in ")]}") if len(token) == 1 else 0
        if token == "," and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return found


class Messages(SphinxDirective):
    """All messages, in a section for each file."""

    def run(self) -> list[nodes.Node]:
        """Make the sections."""
        sections = []
        for path, pairs in itertools.groupby(messages(), key=lambda pair: pair[1]):
            section = nodes.section("", nodes.title(path, path), names=[nodes.fully_normalize_name(path)])
            section += nodes.bullet_list(
                "", *(nodes.list_item("", nodes.paragraph("", "", nodes.literal(text, text))) for text, _ in pairs)
            )
            self.state.document.note_implicit_target(section)
            sections.append(section)
        return sections


def setup(app: Sphinx) -> dict[str, bool]:
    """Name the directive."""
    app.add_directive("messages", Messages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
