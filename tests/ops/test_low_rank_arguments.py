"""Wrong low-rank factors of expert_ffn and gmm."""

from typing import Any

import pytest
import torch

from maxmoe import ops
from support.ffn_call import ffn_call
from support.low_rank_calls import PROJECTIONS, gmm_call, with_factors
from support.operator_calls import refusal
from support.shapes import SKEWED


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_wrong_factors_of_expert_ffn(path: str, projection: str) -> None:
    call = with_factors(ffn_call(SKEWED))
    a, b = (call.arguments[f"{projection}_factors.{field}"] for field in "ab")
    count, inner, rank = a.shape
    wrong = {
        "a": (torch.ones(count, inner + 1, rank), "F of up" if projection == "down" else "D of x", inner, inner + 1),
        "b": (torch.ones(count, rank + 1, b.shape[2]), "r of the other factor", rank, rank + 1),
    }
    for field, (factor, *named) in wrong.items():
        with refusal("expert_ffn", f"{projection}_{field}", *named):
            call.replace(**{f"{projection}_factors.{field}": factor})()
    with refusal("expert_ffn", f"{projection}_a", count, count - 1):
        call.replace(**{f"{projection}_factors.a": a[1:]})()
    with refusal("expert_ffn", f"{projection}_b", b.shape[2], b.shape[2] - 1):
        call.replace(**{f"{projection}_factors.b": b[..., 1:]})()


def test_factors_of_a_gate_that_is_not_there(path: str) -> None:
    gated, plain = with_factors(ffn_call(SKEWED)), ffn_call(SKEWED, gated=False)
    fields = {name: value for name, value in gated.arguments.items() if name.startswith("gate_factors")}
    with refusal("expert_ffn", "gate_a", "must be None without gate"):
        plain.replace(**fields)()


def test_wrong_factors_of_gmm(path: str) -> None:
    call = gmm_call(SKEWED)
    a, b = call.arguments["rhs_factors.a"], call.arguments["rhs_factors.b"]
    for field, factor, *named in (
        ("a", a[:, 1:], "D of lhs", a.shape[1], a.shape[1] - 1),
        ("a", a[1:], "L of rhs", len(a), len(a) - 1),
        ("b", b[:, 1:], "r of the other factor", b.shape[1], b.shape[1] - 1),
        ("b", b[..., 1:], "F of rhs", b.shape[2], b.shape[2] - 1),
    ):
        with refusal("gmm", f"rhs_{field}", *named):
            call.replace(**{f"rhs_factors.{field}": factor})()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a": torch.ones(2, 3)}, ValueError, r"factors.a must be floating, of shape \(L, in, r\), got .*\(2, 3\)"),
        ({"b": None}, ValueError, r"factors.b must be floating, of shape \(L, r, out\), got None"),
        ({"b": torch.ones(2, 3, 4).long()}, ValueError, r"factors.b must be floating, .* got torch.int64"),
        ({"a": torch.ones(2, 3, 4).cfloat()}, ValueError, r"factors.a must be floating, .* got torch.complex64"),
        ({"scale": "2"}, TypeError, "factors.scale must be a number, got str"),
    ],
)
def test_what_are_no_factors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call = gmm_call(SKEWED).replace(**{f"rhs_factors.{name}": value for name, value in changes.items()})
    with pytest.raises(error, match=message):
        call()


def test_a_tuple_is_no_factors() -> None:
    a, b = torch.ones(3, 4, 2), torch.ones(3, 2, 5)
    with pytest.raises(TypeError, match=r"factors must be maxmoe.ops.LowRankFactors, got tuple"):
        ops.gmm(torch.ones(2, 4), ops.Projection(torch.ones(3, 4, 5), factors=(a, b)), torch.tensor([1, 1, 0]))
    with pytest.raises(ValueError, match="factors must have at least one item"):
        ops.LowRankFactors.side_by_side([])
