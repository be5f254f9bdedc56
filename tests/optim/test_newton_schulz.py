"""Newton-Schulz: the distance to orthogonal for each set of coefficients, in every shape and dtype."""

from typing import Any

import pytest
import torch

from maxmoe.optim.newton_schulz import COEFFICIENT_SETS, fast_dtype, orthogonalize, steps_of
from optim.muon_by_definition import orthogonalized
from support.parts import assert_same

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
