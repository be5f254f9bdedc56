"""Scales, skipped steps and weights on meshes, against one process whose gradients overflow in the same steps.

test_parallelize.py compares presets.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, Optimizer

from maxmoe.models import Decoder
from maxmoe.optim import Muon, parameter_groups
from maxmoe.parallel import GradScaler, clip_grad_norm_, parallelize
from maxmoe.parallel.grad_scaler import refuse_wrong_scalers
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import batch, decoder, loss, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_cases, run_ranks
from support.trained_decoders import overflow

SCALE = 2.0**10
OPTIONS = {"init_scale": SCALE, "growth_interval": 2}  # the scale grows after two steps


class Training(NamedTuple):
    """Scale and growth tracker after each step, and the weights after the last one."""

    scales: list[tuple[float, int]]
    weights: dict[str, Tensor]


def trained(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    backward: Callable[[Any], object],
    scaler: Any,
    overflows: Iterable[Callable[[], object]],
) -> Training:
    """One step for each of `overflows`, which write infinite gradients."""
    scales = []
    for make_infinite in overflows:
        backward(scaler)
        make_infinite()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        scales.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    return Training(scales, {name: whole(parameter) for name, parameter in model.named_parameters()})


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def nothing() -> None:
    pass


def check(found: Training, expected: Training) -> None:
    assert found.scales == expected.scales
    for name, weight in found.weights.items():
        assert_same(weight, expected.weights[name], name)


def rows() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 2)).double()


def rows_in_one_process(make: Callable[[nn.Module], Iterable[Optimizer]]) -> Training:
    model, x = rows(), torch.ones(3, 4, dtype=torch.float64)
    return trained(
        model,
        make(model),
        lambda scaler: scaler.scale(model(x).sum()).backward(),
        torch.amp.GradScaler("cpu", **OPTIONS),
        [nothing, *[partial(overflow, model[2].weight)] * 2, nothing],
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
    """The gradients are copied from one process, without a backward through several meshes."""
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


def test_optimizers_with_parameters_of_all_kinds() -> None:
    """FSDP2, replicated DTensors, another mesh and plain parameters; the last rank alone overflows, then both."""
    makers = (one, several, fused)
    expected = [rows_in_one_process(make) for make in makers]

    def check_rows(number: int) -> None:
        model = sharded_rows()
        found = trained(
            model,
            makers[number](model),
            lambda scaler: backward_of_rows(model, scaler),
            GradScaler("cpu", **OPTIONS),
            [nothing, partial(overflow, model[2].weight, 1), partial(overflow, model[2].weight), nothing],
        )
        check(found, expected[number])

    run_cases(check_rows, 2, [(0,), (1,), (2,)])


def test_torch_scaler_raises_where_ranks_would_differ() -> None:
    """The error is raised on every rank; no error if the first gradient is sharded over all axes of the others."""

    def part_of_rows(*layers: int) -> nn.Module:
        model = sharded_rows()
        backward_of_rows(model, GradScaler("cpu", **OPTIONS))
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


def test_clipping_and_muon_after_unscaling() -> None:
    """The gradients of the second step overflow, before they are unscaled and clipped."""

    def train(model: Decoder, part: Callable[[Tensor], Tensor], rank: int | None) -> Training:
        optimizer, scaler = Muon(parameter_groups(model), ns_dtype=torch.float64), GradScaler("cpu", **OPTIONS)
        tokens, targets = map(part, batch())
        overflows = iter([nothing, partial(overflow, model.output.weight, rank), nothing])

        def backward(scaler: Any) -> None:
            scaler.scale(loss(model(tokens), targets)).backward()
            next(overflows)()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)

        return trained(model, [optimizer], backward, scaler, [nothing] * 3)

    expected = train(decoder(), lambda tokens: tokens, rank=None)
    assert [scale for scale, _ in expected.scales] == [SCALE, SCALE / 2, SCALE / 2]

    def check_mesh() -> None:
        mesh, rules = Mesh({"expert": 2}), LogicalRules.load("ep-as-dp")
        part = partial(part_by_definition, spec=token_spec(mesh, rules), mesh=mesh)
        check(train(parallelize(decoder(), mesh, rules), part, rank=1), expected)

    run_ranks(check_mesh, 2)


def test_without_gradients_in_one_process() -> None:
    """The error is torch's."""
    scaler, parameter = GradScaler("cpu"), nn.Parameter(torch.ones(2))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(SGD([parameter], lr=0.1))
