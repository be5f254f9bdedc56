"""What docs/ has, as it is written there: classes and functions of its pages, and scripts that make its tables."""

import ast
import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from maxmoe import MoEConfig

DOCS = Path(__file__).parents[2] / "docs"


def documented(page: str, name: str) -> Any:
    """Define a class or a function of docs/how_to: the imports of its block, and the classes and functions."""
    file = DOCS / "how_to" / f"{page}.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", file.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if re.search(rf"^(class|def) {name}\(", block, re.MULTILINE))
    tree, kinds = ast.parse(block), (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    names: dict[str, Any] = {}
    exec(compile(tree, str(file), "exec"), names)
    return names[name]


def router(name: str, **options: Any) -> Callable[[MoEConfig], nn.Module]:
    """Return a function that makes a router of docs/how_to/router.md."""
    return functools.partial(documented("router", name), **options)


def docs_module(name: str) -> ModuleType:
    """Import docs/<name>.py."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


noisy = router("NoisyTopK", jitter=0.1, noise=1.0)
# A layer with E experts needs top_k slots, and a router made from its config.
ROUTERS: dict[str, tuple[Callable[[int], int], Callable[[MoEConfig], nn.Module]]] = {
    "TopK": (lambda num_experts: 2, router("TopK")),
    "TopP": (lambda num_experts: num_experts // 2, router("TopP", p=0.6)),
    "ReLURouter": (lambda num_experts: num_experts, router("ReLURouter", mean_experts=2)),
    "ExpertChoice": (lambda num_experts: num_experts, router("ExpertChoice", mean_experts=2)),
}
