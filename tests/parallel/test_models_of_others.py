"""Models with shared parameters and modules, in-place operations and outputs of any kind: gradients of one process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoEConfig, MoEFeedForward, parallelize
from maxmoe.parallel import Declaration
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_cases
from support.sampling import by_default

MOE = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
NAMES = {"up.weight": ("mlp", "embed"), "up.bias": ("mlp",), "down.weight": ("embed", "mlp")}


class Model(nn.Module):
    """A linear layer, a unit that returns hidden states in some form, and the rest of the model."""

    def __init__(self, unit: nn.Module, rest: Callable[[Any, Tensor], Tensor] = lambda output, _: output) -> None:
        super().__init__()
        self.first, self.unit, self._rest = nn.Linear(8, 8), unit, rest

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self._rest(self.unit(x), x).sin()  # FSDP2 warns of views that the root module returns


class Unit(nn.Module):
    """Gathers the parameters of two linear layers; `returns` makes the output of the hidden states."""

    def __init__(self, returns: Callable[["Unit", Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self._returns = nn.Linear(8, 16), nn.Linear(16, 8), returns
        self.declaration = Declaration(fsdp_unit=True, logical_names=NAMES)

    def forward(self, x: Tensor) -> Any:
        return self._returns(self, self.down(self.up(x).sin()))


@dataclass
class Output:
    hidden_states: Tensor
    name: str = "output"


class Holder:
    def __init__(self, hidden_states: Tensor) -> None:
        self.hidden_states = hidden_states


class Recursive(Unit):
    def __init__(self) -> None:
        super().__init__(lambda _, x: x)

    def forward(self, x: Tensor, depth: int = 2) -> Any:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


class Blocks(nn.Module):
    def __init__(self, share: Callable[[nn.Module, nn.Module], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoEFeedForward(MOE) for _ in range(2))
        share(self.blocks[0], self.blocks[1])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def in_place(output: Tensor, x: Tensor) -> Tensor:
    output += x
    return output


def store(unit: Unit, hidden_states: Tensor) -> None:
    unit.stored = hidden_states


def taken(model: Model) -> Model:
    model._rest = lambda _output, _x: model.unit.stored
    return model


def with_shared_linear() -> Model:
    unit = Unit(lambda _, x: x)
    model = Model(nn.Sequential(unit, nn.Linear(8, 16), nn.Linear(16, 8)))
    unit.up, unit.down = model.unit[1], model.unit[2]
    return model


def share_weight(first: nn.Module, second: nn.Module) -> None:
    second.experts.up_proj = first.experts.up_proj


def share_experts(first: nn.Module, second: nn.Module) -> None:
    second.experts = first.experts


def share_router(first: nn.Module, second: nn.Module) -> None:
    second.router = first.router


class Projection(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T @ self.weight


def with_router_weight_outside() -> Model:
    model = Model(Blocks(lambda *_: None))
    model.first = Projection(8, 4, bias=False)
    model.unit.blocks[0].router.weight = model.first.weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a view that is modified in place": lambda: Model(Unit(lambda _, x: x.flatten().view(x.shape)), in_place),
    "an activation in place": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.Tanh()
    ),
    "a dataclass": lambda: Model(Unit(lambda _, x: Output(x)), lambda output, _: output.hidden_states),
    "an object": lambda: Model(Unit(lambda _, x: Holder(x)), lambda output, _: output.hidden_states),
    "a tensor and an object": lambda: Model(
        Unit(lambda _, x: (x.sum(), Holder(x))), lambda output, _: output[1].hidden_states
    ),
    "a generator": lambda: Model(Unit(lambda _, x: (y for y in [x])), lambda output, _: next(output)),
    "an attribute": lambda: taken(Model(Unit(store))),
    "a unit that calls itself": lambda: Model(Recursive()),
    "modules of a unit and of the model": with_shared_linear,
    "a weight of two blocks": lambda: Model(Blocks(share_weight)),
    "experts of two blocks": lambda: Model(Blocks(share_experts)),
    "a router of two blocks": lambda: Model(Blocks(share_router)),
    "a weight of a block and of the model": with_router_weight_outside,
}


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole on every rank along fsdp")  # small models
@pytest.mark.parametrize("turn", by_default(range(2), [0]))
def test_equals_one_process(turn: int) -> None:
    """Each turn takes every second pair of a model and a mesh, and so every model and every mesh."""
    x = torch.randn(8, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def check(name: str, preset: str, sizes: dict[str, int]) -> None:
        mesh, rules = Mesh(sizes), LogicalRules.load(preset)
        model, ours = made(name), made(name)
        parallelize(ours, mesh, rules, allow_unused=True)
        part = part_by_definition(x, token_spec(mesh, rules), mesh)
        for module, hidden_states in ((model, x), (ours, part)):
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
            for _ in range(2):
                module(hidden_states).square().sum().backward()
                optimizer.step()
        names = [parameter_name for parameter_name, _ in model.named_parameters()]
        assert names == [parameter_name for parameter_name, _ in ours.named_parameters()]
        for parameter_name in names:
            found, expected = ours.get_parameter(parameter_name), model.get_parameter(parameter_name)
            assert_same(found.grad.full_tensor(), expected.grad, parameter_name)
            assert_same(found.full_tensor(), expected, parameter_name)

    meshes = [("default", {"expert": 2}), ("pure-fsdp", {"fsdp": 2}), ("ep-as-dp", {"expert": 2})]
    run_cases(check, 2, [(name, *mesh) for name in MODELS for mesh in meshes][turn::2])


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()
