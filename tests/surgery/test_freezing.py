"""freeze_experts: frozen experts keep their bits under every optimizer, all others train as before."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from maxmoe import MoE
from maxmoe.optim import Muon, parameter_groups
from maxmoe.surgery import FrozenExperts, duplicate_experts, freeze_experts
from support.moe_layers import make, tokens

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1),
    "muon": lambda model: Muon(parameter_groups(model), lr=1e-2),
}
each_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def step(layer: MoE, optimizer: Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    layer(x).hidden_states.square().mean().backward()
    optimizer.step()


@each_optimizer
def test_frozen_experts_keep_their_bits(make_optimizer: Callable[[nn.Module], Optimizer]) -> None:
    """With momentum from before and weight decay; the others and the router train as without it."""
    torch.manual_seed(0)
    layer = make(expert_bias=True, num_shared_experts=1)
    optimizer, batches = make_optimizer(layer), [tokens(layer) for _ in range(4)]
    step(layer, optimizer, batches[0])
    twin = copy.deepcopy(layer)
    of_twin = make_optimizer(twin)
    of_twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = {name: value.clone() for name, value in layer.experts.named_parameters()}
    frozen = freeze_experts(layer, [1, 4], optimizer)
    step(layer, optimizer, batches[1])
    step(twin, of_twin, batches[1])
    others = [0, 2, 3, 5]
    for name, value in layer.named_parameters():
        of_experts = name.startswith("experts.")
        assert torch.equal(
            value[others] if of_experts else value, twin.get_parameter(name)[others if of_experts else ...]
        )
        if of_experts:
            assert value.grad is not None and not value.grad[[1, 4]].any() and value.grad[others].any()
    step(layer, optimizer, batches[2])
    for name, value in layer.experts.named_parameters():
        assert torch.equal(value[[1, 4]], before[name][[1, 4]]), name
        assert not torch.equal(value[others], before[name][others]), name
    frozen.remove()
    step(layer, optimizer, batches[3])
    for name, value in layer.experts.named_parameters():
        assert value.grad is not None and value.grad[[1, 4]].any(), name
        assert (value != before[name])[[1, 4]].any(), name


def test_layers_by_path_and_mistakes() -> None:
    model: Any = nn.Sequential(make(), make())
    optimizer = torch.optim.AdamW(model.parameters())
    frozen = freeze_experts(model, {"1": torch.tensor([2])}, optimizer)
    assert isinstance(frozen, FrozenExperts)
    with pytest.raises(ValueError, match=r"1.experts.gate_proj must have no frozen experts, got some"):
        duplicate_experts(model, [0], optimizer=optimizer)
    with pytest.raises(ValueError, match=r"1.experts.gate_proj must have no frozen experts, got some"):
        freeze_experts(model, {"1": [0]}, optimizer)
    frozen.remove()
    others = torch.optim.AdamW([*model[0].parameters(), *model[1].router.parameters()])
    with pytest.raises(ValueError, match=r"optimizer must train 1.experts.gate_proj, got AdamW without it"):
        freeze_experts(model, [0], others)
    for wrong in (None, [optimizer]):
        with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got "):
            freeze_experts(model, [0], wrong)  # type: ignore[arg-type]
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    duplicate_experts(model, [0], optimizer=optimizer)
    with pytest.raises(ValueError, match=r"0: experts must be integers in \[0, num_experts \(7\)\), got 7"):
        freeze_experts(model, [7], optimizer)


def assigned(layer: MoE) -> MoE:
    layer.load_state_dict(layer.state_dict(), assign=True)
    return layer


def with_new_parameter(layer: MoE) -> MoE:
    layer.experts.up_proj = nn.Parameter(layer.experts.up_proj)
    return layer


# torch.compile looks for the gradient of tensors that have none where a graph breaks.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@compiles
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("replaced", [copy.deepcopy, assigned, with_new_parameter])
def test_replaced_parameters_are_not_trained(replaced: Callable[[MoE], MoE], compiled: bool) -> None:
    layer = make()
    x = tokens(layer)
    frozen = freeze_experts(layer, [1], torch.optim.AdamW(layer.parameters()))
    model = replaced(layer)
    run: Any = torch.compile(model, backend="aot_eager") if compiled else model
    with pytest.raises(RuntimeError, match=r"^\w+ has experts frozen.* experts\.\w+ is another parameter.*fully_shard"):
        run(x)
    with torch.no_grad():
        run(x)
    frozen.remove()
    if model is layer:
        run(x)
    torch._dynamo.reset()  # where a graph has broken, later graphs add gradients in another order
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    freeze_experts(model, [1], optimizer)
    before = [parameter[1].clone() for parameter in model.experts.parameters()]
    step(model, optimizer, x)
    assert all(map(torch.equal, before, (parameter[1] for parameter in model.experts.parameters())))


@compiles
def test_a_layer_with_frozen_experts_is_compiled_whole() -> None:
    layer = make()
    x, kept = tokens(layer), layer.experts.up_proj[1].clone()
    optimizer = torch.optim.AdamW(layer.parameters())
    freeze_experts(layer, [1], optimizer)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).hidden_states.square().mean().backward()
    optimizer.step()
    assert torch.equal(layer.experts.up_proj[1], kept)


@each_optimizer
def test_another_optimizer_does_not_train_frozen_experts(make_optimizer: Callable[[nn.Module], Optimizer]) -> None:
    layer = make()
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    frozen = freeze_experts(layer, [1], torch.optim.AdamW(layer.parameters()))
    other = make_optimizer(layer)
    with pytest.raises(RuntimeError, match=r"^\w+ must not train parameters with frozen experts, .* got one of shape"):
        step(layer, other, tokens(layer))
    assert all(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())
    frozen.remove()
    step(layer, other, tokens(layer))
    assert not any(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())
