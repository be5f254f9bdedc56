"""Private names of torch are used in one package, which names their purposes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "maxmoe").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))
# Modules of torch without an underscore whose names may change as the private ones do.
UNSTABLE = ("torch.multiprocessing.reductions", "torch.distributed.distributed_c10d")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attributes(node: ast.expr) -> list[str]:
    """The names of a.b.c, without those before a call."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else names


def private_names(path: Path) -> Iterator[str]:
    """Names of torch that a file imports or reads, and private attributes of objects that the file does not define."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    own = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "transformers", "peft"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (f"line {node.lineno}: {part}" for part in parts if is_private(part) or node.module in UNSTABLE)
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
            yield from (f"line {node.lineno}: {part}" for part in parts if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield f"line {node.lineno}: {'.'.join(attributes(node))}"


HOMES = {
    *(ROOT / "maxmoe/_torch").glob("*.py"),
    ROOT / "maxmoe/adapters/_peft.py",
    ROOT / "maxmoe/integrations/transformers/_transformers.py",
}
# Named tuples have public attributes with an underscore; `_exit`, `_getframe` are of the standard library.
ALLOWED = {"_replace", "_fields", "_asdict", "_exit", "_getframe", "_C"}


def test_private_names_of_torch_are_in_one_package() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in FILES
        if path not in HOMES
        and (names := [name for name in private_names(path) if re.split("[ .]", name)[-1] not in ALLOWED])
    }
    assert not found, "put them into maxmoe/_torch/, with the reason"
