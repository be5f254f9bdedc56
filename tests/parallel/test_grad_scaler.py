"""Optimizers with parameters of all kinds skip the steps of one process; test_parallelize.py has models on meshes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, Optimizer

from maxmoe.parallel import GradScaler
from maxmoe.parallel.grad_scaler import refuse_wrong_scalers
from parallel.trainings import overflow
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks

SCALE = 2.0**10
OPTIONS = {"init_scale": SCALE, "growth_interval": 2}  # the scale grows after two steps


def rows() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 2)).double()


def sharded_rows() -> nn.Sequential:
    """Parameters of FSDP2, replicated ones, shards of another mesh, and plain ones in one model."""
    model = rows()
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    fully_shard(model[0], mesh=mesh)
    for layer, on, placements in ((model[1], mesh, [Replicate()]), (model[2], other, [Replicate(), Shard(0)])):
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), on, placements)))
    return model


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def backward(model: nn.Module, scaler: Any) -> None:
    """The gradients are copied from one process, without a backward through several meshes."""
    alone, x = rows(), torch.ones(3, 4, dtype=torch.float64)
    for parameter, value in zip(alone.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(whole(value))
    scaler.scale(alone(x).sum()).backward()
    for parameter, value in zip(model.parameters(), alone.parameters(), strict=True):
        gradient: Any = value.grad
        is_distributed = isinstance(parameter, DTensor)
        parameter.grad = (
            distribute_tensor(gradient, parameter.device_mesh, parameter.placements) if is_distributed else gradient  # type: ignore[attr-defined]
        )


class Training(NamedTuple):
    """Scale and growth tracker after each step, and the weights after the last one."""

    scales: list[tuple[float, int]]
    weights: list[Tensor]


def trained(model: nn.Sequential, make: Callable[[nn.Sequential], list[Optimizer]], scaler: Any) -> Training:
    """Four steps: the gradients of the second one overflow on the last rank, of the third one on both."""
    optimizers, scales = make(model), []
    for overflowing in ((), (1,), (None,), ()):
        backward(model, scaler)
        for rank in overflowing:
            overflow(model[2].weight, rank)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    return Training(scales, [whole(parameter) for parameter in model.parameters()])


def one(model: nn.Sequential) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def several(model: nn.Sequential) -> list[Optimizer]:
    """Only the one whose gradients overflow skips its step."""
    return [Adam(layer.parameters(), lr=0.1) for layer in model]


def fused(model: nn.Sequential) -> list[Optimizer]:
    """Fused kernels skip the step themselves; they take plain tensors or DTensors, not both."""
    return [Adam(layers.parameters(), lr=0.1, fused=True) for layers in (model[:3], model[3])]


def test_optimizers_with_parameters_of_all_kinds() -> None:
    makers = (one, several, fused)
    expected = [trained(rows(), make, torch.amp.GradScaler("cpu", **OPTIONS)) for make in makers]

    def check(number: int) -> None:
        found = trained(sharded_rows(), makers[number], GradScaler("cpu", **OPTIONS))
        assert found.scales == expected[number].scales
        for weight, of_one_process in zip(found.weights, expected[number].weights, strict=True):
            assert_same(weight, of_one_process)

    run_cases(check, 2, [(0,), (1,), (2,)])


def test_torch_scaler_raises_where_ranks_would_differ() -> None:
    """The error is raised on every rank; no error if the first gradient is sharded over all axes of the others."""

    def part_of_rows(*layers: int) -> nn.Module:
        model = sharded_rows()
        backward(model, GradScaler("cpu", **OPTIONS))
        return nn.ModuleList(model[layer] for layer in layers)

    def step(model: nn.Module) -> None:
        scaler = torch.amp.GradScaler("cpu", **OPTIONS)
        scaler.scale(torch.ones(()))
        if dist.get_rank() == 1:
            overflow(next(model.parameters()))
        scaler.step(SGD(model.parameters(), lr=0.1))
        scaler.update()
        assert scaler.get_scale() == SCALE / 2

    def check_models() -> None:
        refuse_wrong_scalers()
        for layers in ((0, 1), (0, 2), (2, 0)):
            step(part_of_rows(*layers))
        for layers in ((1, 0), (1, 2), (0, 3), (3, 0)):
            model = part_of_rows(*layers)
            with pytest.raises(RuntimeError, match=r"skip different steps: use maxmoe\.parallel\.GradScaler$"):
                step(model)

    run_ranks(check_models, 2)


def test_without_gradients_in_one_process() -> None:
    """The error is torch's."""
    scaler, parameter = GradScaler("cpu"), nn.Parameter(torch.ones(2))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(SGD([parameter], lr=0.1))
