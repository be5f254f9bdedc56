"""Optimizers of torch with DTensors of several placements and meshes: as in one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from support.parts import assert_same
from support.run_ranks import run_cases

SHAPES = ((4, 6), (6, 4), (5, 6), (8, 2))
RIGHT = [(kind, {}) for kind in ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"]]
RIGHT += [
    ("SGD", {"momentum": 0.9}),
    ("Adam", {"foreach": True}),
    ("Adam", {"fused": True}),
    ("AdamW", {"fused": True}),
]


def stepped(kind: str, options: dict[str, Any], parameters: list[nn.Parameter]) -> list[Tensor]:
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, **options)
    for _ in range(2):
        optimizer.step()
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in parameters]


def parameters_of(place: Callable[[Tensor, int], Tensor]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = []
    for index, shape in enumerate(SHAPES):
        value, gradient = torch.randn(2, *shape, dtype=torch.float64)
        parameters.append(nn.Parameter(place(value, index)))
        parameters[-1].grad = place(gradient, index)
    return parameters


def check(kind: str, options: dict[str, Any]) -> None:
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    placed: list[Any] = [(one, [Replicate()]), (one, [Shard(0)]), (one, [Shard(1)]), (two, [Replicate(), Shard(0)])]
    sharded = parameters_of(lambda tensor, index: distribute_tensor(tensor, *placed[index]))
    found = stepped(kind, options, sharded)
    for actual, expected in zip(found, stepped(kind, options, parameters_of(lambda tensor, _: tensor)), strict=True):
        assert_same(actual, expected)


def test_optimizers_are_right() -> None:
    run_cases(check, 2, RIGHT)
