"""Parallelized modules of other libraries, whose names are declared outside of them."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoE, MoEConfig
from maxmoe.models.blocks import FeedForward
from maxmoe.nn import MoEOutput
from maxmoe.parallel import Declaration, parallelize
from maxmoe.sharding import LogicalRules, Mesh, P
from support.parallel_decoder import MeshRules, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import fake_rank, run_cases

NAMES = {"first.weight": ("mlp", "embed"), "second.weight": ("embed", "mlp")}


class TwoLayers(nn.Module):
    """A module of another library, whose names are declared outside of it; its bias has no names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.second = nn.Linear(8, 4)
        self.declaration = Declaration(logical_names=NAMES)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.second(self.first(x).relu()) * scale


def test_modules_of_others() -> None:
    torch.manual_seed(0)
    model, x = TwoLayers().double(), torch.randn(8, 4, dtype=torch.float64)
    model.second.bias = None
    model(x, scale=3.0).square().sum().backward()

    def check(layout: MeshRules, inner: dict[str, int]) -> None:
        mesh, table = Mesh(layout.sizes), LogicalRules.load(layout.rules)
        ours = TwoLayers().double()
        ours.second.bias = None
        ours.load_state_dict(model.state_dict())
        if inner:
            ours.declaration = Declaration(logical_names=NAMES, tensor_parallel_dims=inner)
        parallelize(ours, mesh, table, allow_unused=True)
        spec = token_spec(mesh, table)
        part = part_by_definition(x, spec, mesh).requires_grad_()
        ours(part, scale=3.0).square().sum().backward()
        for name, parameter in ours.named_parameters():
            assert_same(parameter.grad.full_tensor(), model.get_parameter(name).grad, name)

    layouts = [
        MeshRules("ep-tp", {"tensor": 2, "expert": 2}),
        MeshRules("default", {"fsdp": 2, "tensor": 2}),
        MeshRules("pure-fsdp", {"fsdp": 2, "expert": 2}),
    ]
    run_cases(check, 4, itertools.product(layouts, ({}, {"mlp": 8})))


class ScaledMoE(MoE):
    """A layer with an additional parameter beside the experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, dtype=torch.float64)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, config.hidden_size, dtype=torch.float64))

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> MoEOutput:
        output = super().forward(x * self.scale, token_mask)
        return output._replace(hidden_states=output.hidden_states * self.scale)


def test_a_parameter_of_a_layer_is_not_one_of_its_experts() -> None:
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=4, intermediate_size=4, num_experts=4, top_k=2)
    model, x = ScaledMoE(config), torch.randn(8, 3, 4, dtype=torch.float64)
    model(x).hidden_states.square().sum().backward()

    def check(rules: str) -> None:
        mesh, table = Mesh({"fsdp": 2, "expert": 2}), LogicalRules.load(rules)
        ours = ScaledMoE(config)
        ours.load_state_dict(model.state_dict())
        parallelize(ours, mesh, table, allow_unused=True)
        part = part_by_definition(x, token_spec(mesh, table), mesh)
        ours(part).hidden_states.square().sum().backward()
        for name, parameter in ours.named_parameters():
            assert_same(parameter.grad.full_tensor(), model.get_parameter(name).grad, name)

    run_cases(check, 4, [("ep-as-dp",), ("ep-tp",)])


TABLES: dict[str, list[Any]] = {
    "both": [("mlp", "expert"), ("activation_mlp", "expert")],
    "activations only": [("mlp", None), ("activation_mlp", "expert")],
    "weights only, on the axis of the tokens": [("mlp", "fsdp"), ("activation_mlp", None)],
    "weights on more axes": [("mlp", ("expert", "fsdp")), ("activation_mlp", ("expert",))],
}


def test_parts_are_computed_where_weights_and_activations_lie_on_an_axis() -> None:
    """On other axes weights are gathered; the result always equals one process's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(FeedForward(4, 8)).double(), torch.randn(4, 3, 4, dtype=torch.float64)
    model(x).square().sum().backward()

    def check(_name: str, table: list[Any]) -> None:
        rules = LogicalRules([("activation_batch", "fsdp"), ("activation_length", None), ("embed", None), *table])
        mesh, ours = Mesh({"fsdp": 2, "expert": 2}), nn.Sequential(FeedForward(4, 8)).double()
        ours.load_state_dict(model.state_dict())
        parallelize(ours, mesh, rules, allow_unused=True)
        ours(part_by_definition(x, P("fsdp", None, None), mesh)).square().sum().backward()
        for name, parameter in ours.named_parameters():
            assert_same(parameter.grad.full_tensor(), model.get_parameter(name).grad, name)

    run_cases(check, 4, TABLES.items())


def test_parts_of_a_module_must_add_up_to_a_tensor() -> None:
    class Pair(TwoLayers):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return x, x

    with fake_rank(0, 2):
        model = Pair()
        model.declaration = Declaration(logical_names=NAMES, tensor_parallel_dims={"mlp": 8})
        model.second.bias = None
        parallelize(model, Mesh({"expert": 2}), "ep-tp")
        message = "Pair declares tensor_parallel_dims and must return a tensor, got <class 'tuple'>"
        with pytest.raises(TypeError, match=f"^{message}$"):
            model(torch.randn(2, 4))
