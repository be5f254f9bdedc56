"""The routers of docs/how_to/router.md, as they are written there."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from maxmoe import MoEConfig

PAGE = Path(__file__).parents[2] / "docs/how_to/router.md"


def documented(name: str) -> Any:
    """Define the class of this name: the imports of its block, and the class."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if f"\nclass {name}(" in block)
    tree = ast.parse(block)
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]
    names: dict[str, Any] = {}
    exec(compile(tree, str(PAGE), "exec"), names)
    return names[name]


def noisy(config: MoEConfig) -> nn.Module:
    """Make the router with random numbers."""
    router: nn.Module = documented("NoisyTopK")(config, jitter=0.1, noise=1.0)
    return router


# A layer with E experts needs top_k slots, and a router made from its config.
ROUTERS: dict[str, tuple[Callable[[int], int], Callable[[MoEConfig], nn.Module]]] = {
    "TopK": (lambda num_experts: 2, documented("TopK")),
    "TopP": (lambda num_experts: num_experts // 2, lambda config: documented("TopP")(config, p=0.6)),
    "ReLURouter": (lambda num_experts: num_experts, lambda config: documented("ReLURouter")(config, mean_experts=2)),
    "ExpertChoice": (
        lambda num_experts: num_experts,
        lambda config: documented("ExpertChoice")(config, mean_experts=2),
    ),
}
