"""Modules that declare logical names, and rules and a mesh for them."""

from typing import Any

import torch
from torch import nn

from maxmoe.parallel import Declaration
from maxmoe.sharding import LogicalRules, Mesh

RULES = LogicalRules([("exp", "expert"), ("embed", "fsdp"), ("mlp", ("expert", "fsdp")), ("q_heads", None)])
MESH = Mesh.planned({"fsdp": 2, "expert": 4})


class Inner(nn.Module):
    declaration = Declaration(logical_names={"weight": ("mlp", "embed"), "bias": ("mlp",)})

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.register_parameter("bias", nn.Parameter(torch.randn(8)) if bias else None)


class Outer(nn.Module):
    def __init__(self, **names: Any) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner(bias=False)
        self.extra = None
        self.scale = nn.Parameter(torch.randn(()))
        self.declaration = Declaration(logical_names=names)
