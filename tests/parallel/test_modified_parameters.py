"""An optimizer that steps between a forward and its backward: an error on every mesh, as in one process."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel import parallelize, token_sharding
from maxmoe.sharding import Mesh
from support.parallel_decoder import BLOCK, MeshRules, batch, decoder, loss
from support.parts import assert_same
from support.run_ranks import run_cases

MESHES = [
    MeshRules("pure-fsdp", {"fsdp": 2}),
    MeshRules("shard-exp-on-fsdp", {"fsdp": 2}),
    MeshRules("ep-as-dp", {"expert": 2}),
    MeshRules("ep-tp", {"expert": 2}),
    MeshRules("default", {"data": 2}),
    MeshRules("default", {"tensor": 2}),
    MeshRules("default", {"context": 2}),
]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "Muon": lambda model: Muon(parameter_groups(model), lr=0.1),
}


def step_between(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> None:
    first, second = loss(model(tokens), targets), loss(model(tokens), targets)
    first.backward()
    optimizer.step()
    second.backward()


def on_mesh(model: nn.Module, layout: MeshRules) -> tuple[Tensor, Tensor]:
    mesh = Mesh(layout.sizes)
    parallelize(model, mesh, layout.rules)
    tokens, targets = batch()
    part = token_sharding(mesh, layout.rules).slices(tokens.shape)
    return tokens[part], targets[part]


def test_a_step_before_the_backward_is_an_error_on_every_rank() -> None:
    """Muon modifies the shards of FSDP2, not the DTensors."""

    def check(layout: MeshRules, optimizer: str) -> None:
        model = decoder(BLOCK)
        tokens, targets = on_mesh(model, layout)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step_between(model, OPTIMIZERS[optimizer](model), tokens, targets)

    run_cases(check, 2, zip(MESHES, itertools.cycle(["Muon", "SGD", "AdamW"])))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_process_says_the_same(name: str) -> None:
    model = decoder()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_between(model, OPTIMIZERS[name](model), *batch())


def test_parameters_that_the_backward_does_not_need_may_be_modified() -> None:
    """The gradient of an embedding does not depend on its values, so that one process computes it, too."""

    def train_embedding(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        step_between(model, torch.optim.SGD([model.embedding.weight], lr=0.1), tokens, targets)
        gradient: Tensor = model.embedding.weight.grad
        return gradient

    def embedding_model() -> nn.Module:
        model = decoder(BLOCK).requires_grad_(False)
        model.embedding.requires_grad_(True)
        return model

    expected = train_embedding(embedding_model(), *batch())

    def check(layout: MeshRules) -> None:
        model = embedding_model()
        assert_same(train_embedding(model, *on_mesh(model, layout)).full_tensor(), expected)  # type: ignore[attr-defined]

    run_cases(check, 2, [(layout,) for layout in MESHES])
