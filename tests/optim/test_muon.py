"""Muon in one process: against torch.optim.Muon, bit by bit where possible, and a definition in float64; errors."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe.optim import Muon, parameter_groups
from maxmoe.optim.newton_schulz import COEFFICIENT_SETS, fast_dtype, orthogonalize, steps_of
from support.moe_layers import make
from support.parts import assert_same

OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.5},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
]
SHAPES = [(24, 16), (16, 24), (96, 128), (32, 32), (1, 7), (7, 1)]


QUINTIC = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonalized(matrix: Tensor, steps: Sequence[Sequence[float]] = QUINTIC, eps: float = 1e-7) -> Tensor:
    """Newton-Schulz by its polynomials, which act on the singular values only."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / max(float(s.square().sum().sqrt()), eps)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


def muon_by_definition(
    weight: Tensor, gradients: Sequence[Tensor], *, lr: float, weight_decay: float = 0.1, momentum: float = 0.95
) -> Tensor:
    """Weight of a matrix ``[out, in]`` after a step for each gradient."""
    weight, average = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
    for gradient in gradients:
        average = momentum * average + (1 - momentum) * gradient.double()
        update = momentum * average + (1 - momentum) * gradient.double()
        weight = (1 - lr * weight_decay) * weight - lr * scale * orthogonalized(update)
    return weight


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
        expected = muon_by_definition(whole, grads, lr=0.1)
        assert_same(actual.contiguous(), expected, tolerance=1e-11)


def split(stack: Tensor, input_dim: int, fused_gate: str | None) -> list[Tensor]:
    """The matrices [out, in], gate before up."""
    parts = []
    for matrix in stack.detach().view(-1, *stack.shape[-2:]):
        matrix = matrix if input_dim == -1 else matrix.T
        F = len(matrix) // 2
        halves = {None: [matrix], "concatenated": [matrix[:F], matrix[F:]], "interleaved": [matrix[0::2], matrix[1::2]]}
        parts += halves[fused_gate]
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_gradient_is_no_update(dtype: torch.dtype) -> None:
    """Experts without tokens are unchanged to the bit; states exist from the first step on, of frozen ones never."""
    stack, unused, frozen = matrices((4, 8, 6), (4, 3, 2), (2, 2, 2))
    frozen.requires_grad_(False)
    before = stack.detach().clone(), unused.detach().clone()
    optimizer = Muon([{"params": [stack, unused, frozen], "input_dim": -2}], weight_decay=0.0, ns_dtype=dtype)
    stack.grad = torch.randn_like(stack)
    stack.grad[1:3] = 0.0
    optimizer.step()
    assert stack[1:3].equal(before[0][1:3]) and unused.equal(before[1])
    assert not (stack[0] == before[0][0]).any()
    assert optimizer.state[stack]["momentum_buffer"][1:3].eq(0).all()
    assert optimizer.state[unused]["momentum_buffer"].eq(0).all() and frozen not in optimizer.state


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


def test_a_schedule_moves_the_learning_rates() -> None:
    (parameter,) = matrices((4, 3))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Muon([parameter], lr=torch.tensor(1.0), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = parameter.detach().clone()
    assert optimizer.step(lambda: 7) == 7
    schedule.step()
    assert parameter.equal(before)


# Newton-Schulz: the distance to orthogonal for each set of coefficients, in every shape and dtype

# Singular values after 5 steps of matrices whose smallest one is 1e-2 of the norm, and what rounding adds to it.
BOUNDS = {"quintic": (0.68, 1.2), "polar_express": (0.86, 1.13)}
ROUNDING = {torch.bfloat16: 0.03, torch.float32: 1e-3, torch.float64: 1e-6}


def with_singular_values(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    u, _ = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64))
    return (u * values) @ v.T


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 40), (40, 16), (1, 9), (9, 1)])
def test_results_are_nearly_orthogonal(name: str, dtype: torch.dtype, rows: int, columns: int) -> None:
    (low, high), rounding = BOUNDS[name], ROUNDING[dtype]
    for scale in (1e-6, 1.0, 1e6):
        values = torch.logspace(0, -1.5, min(rows, columns), dtype=torch.float64) * scale
        stack = torch.stack([with_singular_values(values, rows, columns) for _ in range(3)]).to(dtype)
        result = orthogonalize(stack, steps_of(name, 5), 1e-7)
        assert result.shape == stack.shape and result.dtype == dtype
        found = torch.linalg.svdvals(result.double())
        assert low - rounding <= found.min() and found.max() <= high + rounding, (scale, found.min(), found.max())


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
def test_only_singular_values_change(name: str, num_steps: int) -> None:
    stack = torch.randn(4, 6, 5, dtype=torch.float64)
    steps = steps_of(name, num_steps)
    for actual, matrix in zip(orthogonalize(stack, steps, 1e-7), stack, strict=True):
        assert_same(actual.contiguous(), orthogonalized(matrix, steps), tolerance=1e-12)


def test_polar_express_converges() -> None:
    """More steps come nearer to orthogonal, except with the usual quintic polynomial."""
    stack = with_singular_values(torch.logspace(0, -2.5, 12, dtype=torch.float64), 12, 20).unsqueeze(0)
    errors = []
    for num_steps in (5, 6, 7):
        values = torch.linalg.svdvals(orthogonalize(stack, steps_of("polar_express", num_steps), 1e-7))
        errors.append(float((values - 1).abs().max()))
    assert errors == sorted(errors, reverse=True) and errors[0] < 0.2 and errors[-1] < 1e-4, errors


def test_stacks_larger_than_a_chunk_and_empty_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((0, 4, 3), (2, 0, 3), (2, 3, 0)):
        assert orthogonalize(torch.empty(shape), steps_of("quintic", 5), 1e-7).shape == shape
    stack, steps = torch.randn(2, 5, 4, 3, dtype=torch.float64), steps_of("quintic", 5)
    whole = orthogonalize(stack, steps, 1e-7)
    monkeypatch.setattr("maxmoe.optim.newton_schulz.CHUNK", 3 * 12)
    assert_same(orthogonalize(stack, steps, 1e-7), whole)


def test_the_dtype_is_what_the_processor_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for isas, expected in ((["baseline", "avx512bf16"], torch.bfloat16), (["baseline", "avx2"], torch.float32)):
        monkeypatch.setattr("maxmoe._C.build_info", lambda isas=isas: {"supported_isas": isas})
        assert fast_dtype(torch.device("cpu")) == expected
        assert fast_dtype(torch.device("cuda")) == torch.bfloat16


def test_coefficients_of_each_step() -> None:
    first, second = (3.0, -3.0, 1.0), (1.875, -1.25, 0.375)
    assert steps_of([first, second], 4) == [first, second, second, second]
    assert steps_of(first, 2) == [first, first]
    bad: list[Any] = [(1.0, 2.0), [(1.0, 2.0, 3.0), (1.0,)]]
    for coefficients in bad:
        with pytest.raises(ValueError, match="not enough values to unpack"):
            steps_of(coefficients, 5)
    message = r"ns_coefficients must be one of \['polar_express', 'quintic'\], got 'polar_expres'"
    with pytest.raises(ValueError, match=message):
        steps_of("polar_expres", 5)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentun": 0.9}, "a group of muon has no option 'momentun'; the nearest are 'momentum'"),
        ({"betas": (0.9, 0.9)}, "a group of muon has no option 'betas'"),
        ({"algorithm": "adamw", "momentum": 0.9}, "a group of adamw has no option 'momentum'"),
        ({"algorithm": "adam"}, r"algorithm must be one of \['adamw', 'muon'\], got 'adam'"),
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"eps": float("nan")}, "eps must be at least 0, got nan"),
        ({"adjust_lr_fn": "spectral"}, r"adjust_lr_fn must be one of \(None, 'original', .*got 'spectral'"),
        ({"ns_dtype": torch.float32}, "a group of muon has no option 'ns_dtype'"),
        ({"input_dim": 1}, r"input_dim must be one of \(-1, -2\), got 1"),
        ({"fused_gate": "stacked"}, "fused_gate must be one of .*got 'stacked'"),
        ({"fused_gate": "interleaved", "input_dim": -2}, r"w must have an even number of outputs .* shape \(4, 3\)"),
    ],
)
def test_options_of_a_group(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^ns_dtype must be one of .*got torch.float16"):
        Muon([matrices((4, 3))[0]], ns_dtype=torch.float16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [("w", matrices((4, 3))[0])], **options}])


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (matrices((2, 4, 3))[0], r"w must be a matrix, got the shape \(2, 4, 3\); stacks of matrices need input_dim"),
        (matrices((4,))[0], r"w must be a matrix, got the shape \(4,\)"),
        (nn.Parameter(torch.randn(2, 2, dtype=torch.complex64)), "w must be floating and real, got torch.complex64"),
    ],
)
def test_parameters_that_are_no_matrices(parameter: nn.Parameter, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([("w", parameter)])


def test_no_matrices_at_all() -> None:
    with pytest.raises(ValueError, match=r"Muon got no matrices, only parameters for AdamW: 0\.weight, 1\.weight"):
        Muon(parameter_groups(nn.Sequential(nn.Embedding(3, 4), nn.RMSNorm(4))))


# State dicts


def step(model: nn.Module, optimizer: Muon) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def stepped(**options: Any) -> tuple[nn.Module, Muon]:
    layer = make(**options)
    optimizer = Muon(parameter_groups(layer))
    step(layer, optimizer)
    return layer, optimizer


def test_state_dicts_go_round(tmp_path: Any) -> None:
    """A state dict is saved and read without pickle: the next step has the same bits, also of a copy."""
    (one, optimizer), other = stepped(num_shared_experts=1), make(num_shared_experts=1)
    other.load_state_dict(one.state_dict())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = Muon(parameter_groups(other), lr=7.0)
    loaded.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    copied = deepcopy((one, optimizer))
    for module, each in ((one, optimizer), (other, loaded), copied):
        torch.manual_seed(2)
        step(module, each)
    for name, parameter in one.named_parameters():
        assert parameter.equal(other.get_parameter(name)) and parameter.equal(copied[0].get_parameter(name)), name
    copied[1].add_param_group({"params": [("extra", *matrices((4, 3)))]})
    copied[1].step()


def test_state_dicts_of_others() -> None:
    layer, optimizer = stepped(num_shared_experts=1)
    before = deepcopy(optimizer.state_dict())
    adamw = torch.optim.AdamW(layer.parameters())
    adamw.step()
    with pytest.raises(ValueError, match="parameter groups"):
        adamw.load_state_dict(optimizer.state_dict())
    without_names, swapped = deepcopy(before), deepcopy(before)
    for group in without_names["param_groups"]:
        del group["param_names"]
    swapped["param_groups"].reverse()
    for state, message in (
        (adamw.state_dict(), r"must be of maxmoe.optim.Muon, got .*'betas'.* load the model"),
        (
            stepped()[1].state_dict(),
            r"must have the parameters of the optimizer in their order, got 4 instead of 7; only one of them has "
            r"\('muon', 'shared_experts.down_proj'\)",
        ),
        (without_names, r"got 7 instead of 7; only one of them has \('adamw', 'router.weight'\), \('adamw', 0\), "),
        (swapped, "in their order, got 7 instead of 7; only one of them has none"),
        (
            stepped(num_shared_experts=1, num_experts=4)[1].state_dict(),
            r"momentum_buffer of the parameter experts.gate_proj must have its shape \(6, 7, 5\), got \(4, 7, 5\)|"
            r"exp_avg of the parameter router.weight must have its shape \(6, 7\), got \(4, 7\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()) == str(before)
