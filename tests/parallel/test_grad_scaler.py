"""Scales, skipped steps and weights on meshes, against one process whose gradients overflow in the same steps."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, Optimizer

from maxmoe import set_aux_loss_scale
from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel import GradScaler, clip_grad_norm_, parallelize
from maxmoe.parallel.grad_scaler import refuse_wrong_scalers
from maxmoe.sharding import LogicalRules, Mesh
from support import staged_decoder
from support.parallel_decoder import MeshRules, batch, decoder, layouts, loss, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_ranks

SCALE = 2.0**10
OPTIONS = {"init_scale": SCALE, "growth_interval": 2}  # the scale grows after two steps


class Step(NamedTuple):
    scale: float
    growth: int
    weights: dict[str, Tensor]


def trained(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    backward: Callable[[Any], object],
    scaler: Any,
    overflows: Iterable[Callable[[], object] | None],
) -> list[Step]:
    """One step for each of `overflows`, which write infinite gradients."""
    steps = []
    for overflow in overflows:
        backward(scaler)
        if overflow is not None:
            overflow()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
        steps.append(Step(scaler.get_scale(), scaler.state_dict()["_growth_tracker"], weights))
    return steps


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def overflow(parameter: Tensor, rank: int | None = None) -> None:
    """Make the gradient on one rank infinite, on all if `rank` is None."""
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    assert gradient is not None
    if rank is None or dist.get_rank() == rank:
        gradient.fill_(float("inf"))


def check(found: list[Step], expected: list[Step]) -> None:
    assert [step[:2] for step in found] == [step[:2] for step in expected]
    for actual, right in zip(found, expected, strict=True):
        for name, weight in actual.weights.items():
            assert_same(weight, right.weights[name], name)


def decoder_in_one_process() -> list[Step]:
    model, (tokens, targets) = decoder(), batch()
    first = next(model.parameters())
    return trained(
        model,
        [SGD(model.parameters(), lr=0.1)],
        lambda scaler: scaler.scale(loss(model(tokens), targets)).backward(),
        torch.amp.GradScaler("cpu", **OPTIONS),
        [None, lambda: overflow(first), None, lambda: overflow(first), None, None],
    )


def check_layout(layout: MeshRules, expected: list[Step]) -> None:
    """The embedding, which comes first, is infinite on the last rank, a matrix of the experts on each rank in turn."""
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    spec = token_spec(mesh, rules)
    tokens, targets = (part_by_definition(tensor, spec, mesh) for tensor in batch())
    for rank in range(mesh.num_ranks):
        model = parallelize(decoder(), mesh, rules)
        names = dict(model.named_parameters())
        experts = next(parameter for name, parameter in names.items() if name.endswith("experts.up_proj"))
        found = trained(
            model,
            [SGD(model.parameters(), lr=0.1)],
            lambda scaler, model=model: scaler.scale(loss(model(tokens), targets)).backward(),
            GradScaler("cpu", **OPTIONS),
            [
                None,
                lambda experts=experts, rank=rank: overflow(experts, rank),
                None,
                lambda names=names: overflow(next(iter(names.values())), mesh.num_ranks - 1),
                None,
                None,
            ],
        )
        check(found, expected)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_preset(world_size: int) -> None:
    """An overflow on one rank skips the step on all."""
    expected = decoder_in_one_process()
    assert [step.scale / SCALE for step in expected] == [1, 0.5, 0.5, 0.25, 0.25, 0.5]
    assert [step.growth for step in expected] == [1, 0, 1, 0, 1, 0]

    def check_layouts() -> None:
        for layout in layouts(world_size):
            check_layout(layout, expected)

    run_ranks(check_layouts, world_size, deadline=300)


def rows() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 2)).double()


def rows_in_one_process(make: Callable[[nn.Module], Iterable[Optimizer]], step: int) -> list[Step]:
    model = rows()
    overflows: list[Any] = [None] * 4
    overflows[step] = lambda: overflow(model[2].weight)
    x = torch.ones(3, 4, dtype=torch.float64)
    return trained(
        model,
        make(model),
        lambda scaler: scaler.scale(model(x).sum()).backward(),
        torch.amp.GradScaler("cpu", **OPTIONS),
        overflows,
    )


def sharded_rows() -> nn.Module:
    """Parameters of FSDP2, replicated ones, shards of another mesh, and plain ones in one model."""
    model = rows()
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    fully_shard(model[0], mesh=mesh)
    for layer, on, placements in ((model[1], mesh, [Replicate()]), (model[2], other, [Replicate(), Shard(0)])):
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), on, placements)))
    return model


def backward_of_rows(model: nn.Module, scaler: Any) -> None:
    """With the gradients of one process in the place of a backward through several meshes."""
    alone, x = rows(), torch.ones(3, 4, dtype=torch.float64)
    for parameter, value in zip(alone.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(whole(value))
    scaler.scale(alone(x).sum()).backward()
    for parameter, value in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = value.grad
        assert gradient is not None
        is_distributed = isinstance(parameter, DTensor)
        parameter.grad = (
            distribute_tensor(gradient, parameter.device_mesh, parameter.placements) if is_distributed else gradient
        )


def one(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def several(model: nn.Module) -> list[Optimizer]:
    """Only the one whose gradients overflow skips its step."""
    return [Adam(layer.parameters(), lr=0.1) for layer in model.children()]


def fused(model: nn.Module) -> list[Optimizer]:
    """Fused kernels skip the step themselves; they take plain tensors or DTensors, not both."""
    return [Adam(layers.parameters(), lr=0.1, fused=True) for layers in (nn.ModuleList(model[:3]), model[3])]


@pytest.mark.parametrize("make", [one, several, fused])
def test_optimizers_with_parameters_of_all_kinds(make: Callable[[nn.Module], list[Optimizer]]) -> None:
    """FSDP2, replicated DTensors, another mesh and plain parameters; the last rank alone has the overflow."""
    expected = rows_in_one_process(make, 1)

    def check_rows() -> None:
        model = sharded_rows()
        found = trained(
            model,
            make(model),
            lambda scaler: backward_of_rows(model, scaler),
            GradScaler("cpu", **OPTIONS),
            [None, lambda: overflow(model[2].weight, 1), None, None],
        )
        check(found, expected)

    run_ranks(check_rows, 2)
