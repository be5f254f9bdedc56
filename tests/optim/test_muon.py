"""Muon in one process: against torch.optim.Muon, bit by bit where possible, and a definition in float64."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from maxmoe.optim import Muon, parameter_groups
from support.moe_layers import make
from support.muon_by_definition import muon_by_definition
from support.parts import assert_same

OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.5},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
]
SHAPES = [(24, 16), (16, 24), (96, 128), (32, 32), (1, 7), (7, 1)]


def trained(optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    """The parameters after some steps with the same gradients for every optimizer."""
    generator = torch.Generator().manual_seed(1)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()
    return parameters


def matrices(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(dtype, options, marks=[] if dtype == torch.float32 or not options else pytest.mark.slow)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for options in OPTIONS
        # Without Nesterov, torch.optim.Muon divides a momentum in bfloat16 itself by its norm.
        if dtype != torch.bfloat16 or options.get("nesterov", True)
    ],
    ids=str,
)
def test_matrices_have_the_bits_of_torch(dtype: torch.dtype, options: dict[str, Any]) -> None:
    ours = trained(Muon(matrices(*SHAPES, dtype=dtype), ns_dtype=torch.bfloat16, **options))
    theirs = trained(torch.optim.Muon(matrices(*SHAPES, dtype=dtype), **options))
    for actual, expected in zip(ours, theirs, strict=True):
        assert actual.equal(expected), actual.shape


@pytest.mark.parametrize("fused_gate", [None, "concatenated", "interleaved"])
@pytest.mark.parametrize("input_dim", [-1, -2])
@pytest.mark.parametrize("shape", [(2, 24, 16), (2, 16, 24), (2, 3, 8, 10), (12, 10)])
def test_every_matrix_follows_the_definition(shape: tuple[int, ...], input_dim: int, fused_gate: str | None) -> None:
    """Gate and up are separate matrices with F outputs each; wide and tall, in both orientations."""
    group = {"params": matrices(shape, dtype=torch.float64), "input_dim": input_dim, "fused_gate": fused_gate}
    (parameter,) = trained(Muon([group], lr=0.1, ns_dtype=torch.float64))
    (before,) = matrices(shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    parts = [split(x, input_dim, fused_gate) for x in (parameter, before, *gradients)]
    for actual, whole, *grads in zip(*parts, strict=True):
        expected, _ = muon_by_definition(whole, grads, lr=0.1)
        assert_same(actual.contiguous(), expected, tolerance=1e-11)


def split(stack: Tensor, input_dim: int, fused_gate: str | None) -> list[Tensor]:
    """The matrices [out, in], gate before up."""
    parts = []
    for matrix in stack.detach().view(-1, *stack.shape[-2:]):
        matrix = matrix if input_dim == -1 else matrix.T
        F = len(matrix) // 2
        halves = {
            None: [matrix],
            "concatenated": [matrix[:F], matrix[F:]],
            "interleaved": [matrix[0::2], matrix[1::2]],
        }
        parts += halves[fused_gate]
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_is_no_update(dtype: torch.dtype) -> None:
    """Experts without tokens are unchanged to the bit; their state exists from the first step on."""
    (stack,) = matrices((4, 8, 6))
    before, optimizer = (
        stack.detach().clone(),
        Muon([{"params": [stack], "input_dim": -2}], weight_decay=0.0, ns_dtype=dtype),
    )
    stack.grad = torch.randn_like(stack)
    stack.grad[1:3] = 0.0
    optimizer.step()
    assert stack[1:3].equal(before[1:3])
    assert not (stack[0] == before[0]).any()
    assert optimizer.state[stack]["momentum_buffer"][1:3].eq(0).all()


def test_state_exists_from_the_first_step_on() -> None:
    used, unused, frozen = matrices((4, 3), (3, 4), (2, 2))
    frozen.requires_grad_(False)
    optimizer = Muon([used, unused, frozen])
    used.grad = torch.randn_like(used)
    before = unused.detach().clone()
    optimizer.step()
    assert unused.equal(before)
    assert optimizer.state[unused]["momentum_buffer"].eq(0).all()
    assert frozen not in optimizer.state


def test_an_expert_that_is_chosen_late() -> None:
    """20 steps, with tokens for expert 2 in step 15 alone: weight and momentum by definition."""
    (stack,) = matrices((3, 6, 4), dtype=torch.float64)
    before = stack.detach().clone()
    optimizer = Muon([{"params": [stack], "input_dim": -2}], lr=0.05, ns_dtype=torch.float64)
    gradients = []
    for step in range(20):
        stack.grad = torch.randn_like(stack)
        if step != 15:
            stack.grad[2] = 0.0
        gradients.append(stack.grad.clone())
        optimizer.step()
    for expert in range(3):
        weight, momentum = muon_by_definition(before[expert].T, [each[expert].T for each in gradients], lr=0.05)
        assert_same(stack[expert].detach(), weight.T.contiguous(), tolerance=1e-10)
        average = optimizer.state[stack]["momentum_buffer"][expert]
        assert_same(average, momentum.T.contiguous(), tolerance=1e-12)


def test_all_other_parameters_have_adamw() -> None:
    options: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    layer = make(router_bias=True, expert_bias=True)
    groups = parameter_groups(layer, adamw=options)
    others = {choice.name: choice for choice in groups.choices if choice.matrix is None}
    copies = {name: nn.Parameter(layer.get_parameter(name).detach().clone()) for name in others}
    decayed = [copy for name, copy in copies.items() if others[name].num_dims > 1]
    plain = [copy for name, copy in copies.items() if others[name].num_dims < 2]
    assert len(decayed) == 1 and len(plain) == 4
    theirs = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], **options)
    ours = Muon(groups, lr=1.0)
    for _ in range(3):
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
        for name, copy in copies.items():
            copy.grad = layer.get_parameter(name).grad
        ours.step()
        theirs.step()
    for name, copy in copies.items():
        assert_same(layer.get_parameter(name).detach(), copy.detach(), name)


def test_the_default_dtype_does_not_round_the_number_of_steps() -> None:
    """In bfloat16, 256 + 1 is 256."""
    torch.set_default_dtype(torch.bfloat16)
    matrix, parameter = matrices((2, 2), (3,))
    optimizer = Muon([{"params": [matrix]}, {"params": [parameter], "algorithm": "adamw"}])
    trained(optimizer, 258)
    assert optimizer.state[parameter]["step"] == 258


def test_full_state_dicts_of_torch() -> None:
    """Groups hold what torch's state dicts carry; a loaded optimizer and a copy take the same next step."""
    full = StateDictOptions(full_state_dict=True)

    def stepped(seed: int) -> tuple[nn.Module, Muon]:
        layer = make(dtype=torch.float32)
        optimizer = Muon(parameter_groups(layer), lr=0.1, ns_dtype=torch.float64)
        torch.manual_seed(seed)
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return layer, optimizer

    (layer, optimizer), (other, loaded) = stepped(0), stepped(1)
    state = deepcopy(get_optimizer_state_dict(layer, optimizer, options=full))
    other.load_state_dict(layer.state_dict())
    set_optimizer_state_dict(other, loaded, state, options=full)
    both = deepcopy((layer, optimizer))
    for module, each in ((layer, optimizer), (other, loaded), both):
        torch.manual_seed(2)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        each.step()
    for name, parameter in layer.named_parameters():
        assert parameter.equal(other.get_parameter(name)) and parameter.equal(both[0].get_parameter(name))


def test_a_schedule_moves_the_learning_rates() -> None:
    (parameter,) = matrices((4, 3))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Muon([parameter], lr=torch.tensor(1.0), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = parameter.detach().clone()
    assert optimizer.step(lambda: 7) == 7
    schedule.step()
    assert parameter.equal(before)
