"""Modules of torch whose parameters others read, without a declaration: outputs and gradients of one process."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from maxmoe.parallel import Declaration, parallelize
from maxmoe.parallel.plan.fsdp_units import blocks, fsdp_units
from maxmoe.sharding import LogicalRules, Mesh
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks

X = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Calling(nn.Module):
    """Calls a module of torch."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self._call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.inner, x)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())  # FSDP2 warns of views that a block returns, such as of nn.Linear


class Lists(nn.Module):
    """Reads parameters that are in lists and dicts, and calls modules in them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
        self.vectors = nn.ParameterDict({"bias": nn.Parameter(torch.randn(8))})
        held = nn.ParameterList([nn.Parameter(torch.randn(8, 8))])
        self.blocks = nn.ModuleList([held, nn.ModuleDict({"block": block()}), block()])

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.blocks
        x = x @ self.matrices[0] @ self.matrices[1] + self.vectors["bias"]
        return blocks[2](blocks[1]["block"](x @ blocks[0][0]))


def attention(**options: Any) -> Calling:
    inner = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    return Calling(inner, lambda module, x: module(x, x, x)[0])


def encoder() -> Calling:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Calling(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), lambda module, x: module(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": attention,
    "attention without in_proj": lambda: attention(kdim=8, vdim=8, bias=False),
    "encoder": encoder,
    "transformer": lambda: Calling(
        nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), lambda module, x: module(x, x)
    ),
    "lists": Lists,
    "lstm": lambda: Calling(nn.LSTM(8, 8, 2, batch_first=True), lambda module, x: module(x)[0]),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
}
MESHES = (({"data": 2}, "default"), ({"fsdp": 2}, "pure-fsdp"), ({"expert": 2}, "ep-as-dp"))


def compare(model: nn.Module, one: nn.Module) -> None:
    """Compare two ranks, each with half of the sequences, with one process, in training and in evaluation."""
    part = X.chunk(2)[dist.get_rank()]
    one(X).square().sum().backward()
    model(part).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert_same(parameter.grad.full_tensor(), one.get_parameter(name).grad, name)
    with torch.no_grad():
        assert_same(model.eval()(part), one.eval()(X).chunk(2)[dist.get_rank()], "output")


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole on every rank along fsdp")  # small models
def test_without_a_declaration() -> None:
    def check(name: str, case: tuple[dict[str, int], str]) -> None:
        torch.manual_seed(0)
        one = MODELS[name]().double()
        compare(parallelize(copy.deepcopy(one), Mesh(case[0]), case[1], allow_unused=True), one)

    run_cases(check, 2, itertools.product(MODELS, MESHES))


NAMES = {
    "matrices.0": ("embed", None),
    "matrices.1": (None, "embed"),
    "vectors.bias": ("embed",),
    "blocks.0.0": ("embed", None),
    "blocks.1.block.0.weight": (None, "embed"),
    "blocks.2.0.weight": ("embed", None),
}


def test_parameters_in_lists_are_sharded_by_fsdp2() -> None:
    """Parameters of a list, which has no forward, belong to the root module."""

    def check() -> None:
        torch.manual_seed(0)
        one = Lists().double()
        model = copy.deepcopy(one)
        model.declaration = Declaration(logical_names=NAMES)
        parallelize(model, Mesh({"fsdp": 2}), LogicalRules.load("pure-fsdp"), allow_unused=True)
        compare(model, one)
        managed = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
        assert managed == ["", "blocks.1.block", "blocks.2"]

    run_ranks(check, 2)


@pytest.mark.parametrize("declared", [False, True])
def test_who_gathers(declared: bool) -> None:
    """The module that reads a parameter, or the FSDP unit around it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    if declared:
        layer.declaration = Declaration(fsdp_unit=True)  # type: ignore[assignment]
    units = fsdp_units(layer)
    attention = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    if declared:
        assert units.keys() == {layer} and {f"self_attn.{name}" for name in attention} <= units[layer].keys()
    else:
        assert units[layer.self_attn].keys() == attention and layer not in units
        assert units[layer.linear1] == {"weight": "linear1.weight", "bias": "linear1.bias"}
    lists = Lists()
    assert set(fsdp_units(lists)[lists]) == {"matrices.0", "matrices.1", "vectors.bias", "blocks.0.0"}
    assert list(blocks(lists)) == [lists.blocks[1]["block"], lists.blocks[2]]  # type: ignore[index]
