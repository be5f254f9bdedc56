"""Modules of torch, of other libraries and of users on ranks against one process.

With shared parameters and modules, in-place operations, and names declared outside of them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoE, MoEConfig, MoEFeedForward
from maxmoe.models.blocks import FeedForward
from maxmoe.nn import MoEOutput
from maxmoe.parallel import Declaration, parallelize
from maxmoe.sharding import LogicalRules, Mesh
from parallel.steps_on_ranks import Case, Part, Results, check_cases, each_topic, made
from support.parallel_decoder import LocalSGD, MeshRules
from support.run_ranks import fake_rank

MOE = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
UNIT_NAMES = {"up.weight": ("mlp", "embed"), "up.bias": ("mlp",), "down.weight": ("embed", "mlp")}


def train(model: Any, part: Part) -> Results:
    """Evaluation, and two steps whose gradients add up."""
    x = part(torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    with torch.no_grad():
        evaluated = model.eval()(x)
    descent = LocalSGD(model.train(), 1e-3)
    for _ in range(2):
        model(x).square().sum().backward()
        descent.step()
    return Results({"evaluated": evaluated})


# Models of users


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

    def __init__(self, returns: Callable[["Unit", Tensor], Any] = lambda _, x: x) -> None:
        super().__init__()
        self.up, self.down, self._returns = nn.Linear(8, 16), nn.Linear(16, 8), returns
        self.declaration = Declaration(fsdp_unit=True, logical_names=UNIT_NAMES)

    def forward(self, x: Tensor) -> Any:
        return self._returns(self, self.down(self.up(x).sin()))


class Blocks(nn.Module):
    def __init__(self, share: Callable[[nn.Module, nn.Module], None] = lambda *_: None) -> None:
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


def with_shared_linear() -> Model:
    unit = Unit()
    model = Model(nn.Sequential(unit, nn.Linear(8, 16), nn.Linear(16, 8)))
    unit.up, unit.down = model.unit[1], model.unit[2]
    return model


def share(name: str) -> Callable[[nn.Module, nn.Module], None]:
    """Give a module or parameter of one block to another block."""
    path, _, last = name.rpartition(".")
    return lambda first, second: setattr(second.get_submodule(path), last, getattr(first.get_submodule(path), last))


class ScaledMoE(MoE):
    """A layer with an additional parameter beside the experts, which is not one of the experts."""

    def __init__(self) -> None:
        super().__init__(MOE)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> MoEOutput:
        return super().forward(x * self.scale, token_mask).hidden_states * self.scale  # type: ignore[return-value]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "an activation in place": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.Tanh()
    ),
    "a view is modified in place": lambda: Model(Unit(lambda _, x: x.flatten().view(x.shape)), in_place),
    "modules of a unit and of the model": with_shared_linear,
    "a weight of two blocks": lambda: Model(Blocks(share("experts.up_proj"))),
    "experts of two blocks": lambda: Model(Blocks(share("experts"))),
    "a router of two blocks": lambda: Model(Blocks(share("router"))),
}


# Modules of torch, of which only the lists are declared


class Calling(nn.Module):
    """Calls a module of torch."""

    def __init__(
        self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] = lambda inner, x: inner(x)
    ) -> None:
        super().__init__()
        self.inner, self._call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.inner, x)


class Lists(nn.Module):
    """Reads parameters that are in lists and dicts, and calls modules in them."""

    declaration = Declaration(
        logical_names={
            "matrices.0": ("embed", None),
            "matrices.1": (None, "embed"),
            "vectors.bias": ("embed",),
            "blocks.0.0": ("embed", None),
            "blocks.1.block.0.weight": (None, "embed"),
            "blocks.2.0.weight": ("embed", None),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
        self.vectors = nn.ParameterDict({"bias": nn.Parameter(torch.randn(8))})
        held = nn.ParameterList([nn.Parameter(torch.randn(8, 8))])
        # FSDP2 warns of views that a block returns, such as of nn.Linear.
        one, other = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.blocks = nn.ModuleList([held, nn.ModuleDict({"block": one}), other])

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.blocks
        x = x @ self.matrices[0] @ self.matrices[1] + self.vectors["bias"]
        return blocks[2](blocks[1]["block"](x @ blocks[0][0]))


def attention() -> Calling:
    inner = nn.MultiheadAttention(8, 2, batch_first=True)
    return Calling(inner, lambda module, x: module(x, x, x)[0])


def encoder() -> Calling:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Calling(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), lambda module, x: module(x))


OF_TORCH: dict[str, Callable[[], nn.Module]] = {
    "attention": attention,
    "encoder": encoder,
    "transformer": lambda: Calling(
        nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), lambda module, x: module(x, x)
    ),
    "lists": Lists,
    "lstm": lambda: Calling(nn.LSTM(8, 8, 2, batch_first=True), lambda module, x: module(x)[0]),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def two_ranks(models: dict[str, Callable[[], nn.Module]]) -> Iterator[Case]:
    """By default each model on one of the meshes."""
    meshes = [("default", {"expert": 2}), ("pure-fsdp", {"fsdp": 2}), ("ep-as-dp", {"expert": 2})]
    for number, (name, make) in enumerate(models.items()):
        for of_mesh, layout in enumerate(meshes):
            yield Case(name, MeshRules(*layout), made(seeded, make), train, slow=(number + of_mesh) % 3 != 1)


# Modules of other libraries, whose names are declared outside of them

NAMES = {"first.weight": ("mlp", "embed"), "second.weight": ("embed", "mlp")}


class TwoLayers(nn.Module):
    def __init__(self, **dims: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.declaration = Declaration(logical_names=NAMES, tensor_parallel_dims=dims)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).relu())


TABLES: dict[str, dict[str, Any]] = {
    "weights and activations": {"mlp": "expert", "activation_mlp": "expert"},
    "activations only": {"mlp": None, "activation_mlp": "expert"},
    "weights only, on the axis of the tokens": {"mlp": "fsdp", "activation_mlp": None},
    "weights on more axes": {"mlp": ("expert", "fsdp"), "activation_mlp": ("expert",)},
}


def four_ranks() -> Iterator[Case]:
    both = {"fsdp": 2, "expert": 2}
    for layout in (
        MeshRules("ep-tp", {"tensor": 2, "expert": 2}),
        MeshRules("default", {"fsdp": 2, "tensor": 2}),
        MeshRules("pure-fsdp", both),
    ):
        yield Case("gathers declared weights", layout, made(seeded, TwoLayers), train)
        yield Case("computes parts", layout, made(seeded, made(TwoLayers, mlp=16)), train)
    for preset in ("ep-as-dp", "ep-tp"):
        yield Case("a parameter of a layer beside experts", MeshRules(preset, both), made(seeded, ScaledMoE), train)
    feed_forward = made(seeded, lambda: nn.Sequential(FeedForward(8, 16)))
    for name, table in TABLES.items():
        rules = LogicalRules(
            [("activation_batch", "fsdp"), ("activation_length", None), ("embed", None), *table.items()]
        )
        yield Case(f"rules for {name}", MeshRules("default", both), feed_forward, train, rules=rules)


@pytest.mark.filterwarnings("ignore:.* of the parameters are whole on every rank along fsdp")  # small models
@each_topic(users=two_ranks(MODELS), torch=two_ranks(OF_TORCH), others=four_ranks())
def test_ranks_compute_what_one_process_does(cases: list[Case]) -> None:
    check_cases(cases)


def test_parts_of_a_module_must_add_up_to_a_tensor() -> None:
    class Pair(TwoLayers):
        def forward(self, x: Tensor) -> Any:
            return x, x

    with fake_rank(0, 2):
        model = parallelize(Pair(mlp=16), Mesh({"expert": 2}), "ep-tp")
        message = "Pair declares tensor_parallel_dims and must return a tensor, got <class 'tuple'>"
        with pytest.raises(TypeError, match=f"^{message}$"):
            model(torch.randn(2, 8))
