"""Wrong arguments of each operator: the error names the argument, what it must be and what was given.

`OperatorTests` has every tensor with another dtype, without dimensions and on another device; test_hostile_calls.py
any other nonsense.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from maxmoe import ops
from support import activations
from support.matrix_calls import factored_gmm_call, ffn_call, with_factors
from support.named import named
from support.operator_calls import Call, refusal
from support.paths import emulated
from support.shapes import SKEWED

Table = list[tuple[dict[str, Any], tuple[str, ...]]]
NAN, INFINITY = float("nan"), float("inf")


def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


def number(value: int, count: int = 6) -> Tensor:
    return torch.full((count,), value)


GMM: Table = [
    ({"rhs": torch.randn(2, 3, 5)}, ("rhs", "4", "[2, 3, 5]")),
    ({"rhs": torch.randn(2, 4, 5).double()}, ("rhs", "lhs", "Float", "Double")),
    ({"group_sizes": torch.tensor([3, -1])}, ("group_sizes", "negative", "-1")),
    ({"group_sizes": torch.tensor([3, 4])}, ("group_sizes", "6", "4")),
    ({"group_sizes": torch.tensor([2**62, 2**62, 2**62])}, ("group_sizes", "6", str(2**62))),
    ({"rhs_bias": torch.randn(3, 5)}, ("rhs_bias", "2", "[3, 5]")),
    ({"rhs_bias": torch.randn(2, 4)}, ("rhs_bias", "5", "[2, 4]")),
    ({"rhs_bias": torch.randn(2, 5).double()}, ("rhs_bias", "lhs", "Float", "Double")),
]
TGMM: Table = [
    ({"rhs": torch.randn(5, 3)}, ("rhs", "6", "[5, 3]")),
    ({"rhs": torch.randn(6, 3).double()}, ("rhs", "lhs", "Float", "Double")),
    ({"group_sizes": torch.tensor([3, -1])}, ("group_sizes", "negative", "-1")),
    ({"group_sizes": torch.tensor([3, 4])}, ("group_sizes", "6", "4")),
    ({"num_local_groups": -1}, ("num_local_groups", "-1")),
]
LINEAR: Table = [
    ({"weight": torch.randn(4, 5)}, ("weight", "4", "D of x", "[4, 5]")),
    ({"bias": torch.randn(4)}, ("bias", "5", "E of weight", "[4]")),
    ({"out_dtype": torch.int64}, ("out_dtype", "float64", "Long")),
]
GATHER: Table = [
    ({"index": torch.tensor([0, 1, 2, 5])}, ("index", "5")),
    ({"index": torch.tensor([0, -2, 1, 1])}, ("index", "-1", "5", "-2")),
    ({"weights": torch.zeros(3)}, ("weights", "4", "[3]")),
    ({"start": -1}, ("start", "-1")),
    ({"start": 3, "end": 2}, ("end", "3", "2")),
    ({"end": 5}, ("end", "4", "5")),
]
GATHER_REDUCE: Table = [
    ({"index": number(5)}, ("index", "5")),
    ({"index": number(-7)}, ("index", "-1", "5", "-7")),
    ({"group_size": 4}, ("group_size", "4", "6")),
    ({"group_size": 0}, ("group_size", "0")),
    ({"weights": torch.zeros(3)}, ("weights", "6", "[3]")),
    ({"valid": torch.ones(5, dtype=torch.bool)}, ("valid", "6", "[5]")),
]
SCATTER_ADD: Table = [
    ({"rows": torch.randn(4, 5)}, ("index", "8", "rows", "[6]")),
    ({"index": number(7)}, ("index", "7")),
    ({"index": number(-2)}, ("index", "-1", "7", "-2")),
    ({"num_rows": -1}, ("num_rows", "-1")),
    ({"group_size": 0}, ("group_size", "0")),
    ({"group_size": 4}, ("index", "12", "group_size", "[6]")),
    ({"weights": torch.zeros(5)}, ("weights", "6", "[5]")),
]
DOT: Table = [
    ({"a": torch.randn(2, 5)}, ("index", "4", "rows of a", "[6]")),
    ({"b": torch.randn(7, 4)}, ("b", "5", "[7, 4]")),
    ({"b": torch.randn(7, 5).double()}, ("b", "Float", "Double")),
    ({"index": number(7)}, ("index", "7")),
    ({"index": number(-3)}, ("index", "-1", "7", "-3")),
    ({"group_size": 0}, ("group_size", "0")),
    ({"group_size": 4}, ("index", "12", "group_size", "[6]")),
]
PLAN_OF_ROWS: Table = [
    ({"weights": torch.zeros(20, 2)}, ("weights", "60", "[20, 2]")),
    ({"plan.slots": torch.tensor([60])}, ("slots", "60")),
    ({"plan.slots": zeros(2, 2)}, ("slots", "[R]", "[2, 2]")),
    ({"plan.slots": zeros(2, dtype=torch.int32)}, ("slots", "int64", "Int")),
    ({"plan.slots": zeros(2).to("meta")}, ("slots", "cpu", "meta")),
    ({"plan.rows": number(60, 60)}, ("rows", "60")),
    ({"plan.rows": number(-2, 60)}, ("rows", "60", "-2")),
    ({"plan.rows": zeros(60, 1)}, ("rows", "[T * K]", "[60, 1]")),
    ({"plan.rows": zeros(60, dtype=torch.int32)}, ("rows", "int64", "Int")),
    ({"plan.top_k": 0}, ("top_k", "0")),
]
SORT: Table = [
    *PLAN_OF_ROWS,
    ({"x": torch.randn(19, 4)}, ("60", "57")),
    ({"plan.rows": zeros(59)}, ("rows", "60", "59")),
    ({"plan.top_k": 2}, ("rows", "40", "60")),
]
UNSORT: Table = [*PLAN_OF_ROWS, ({"rows": torch.randn(59, 4)}, ("rows", "59")), ({"plan.top_k": 7}, ("7", "60"))]
PLAN: Table = [
    ({"experts": torch.tensor([[0, 5]])}, ("experts", "-1", "5", "5")),
    ({"experts": torch.tensor([[0, -2]])}, ("experts", "-1", "5", "-2")),
    ({"num_experts": 0}, ("num_experts", "1", "0")),
    ({"first_expert": -1}, ("first_expert", "5", "-1")),
    ({"first_expert": 6}, ("first_expert", "5", "6")),
    ({"num_local_experts": -1}, ("num_local_experts", "5", "-1")),
    ({"num_local_experts": 6}, ("num_local_experts", "5", "6")),
    ({"first_expert": 3, "num_local_experts": 3}, ("num_local_experts", "2", "3")),
    ({"max_rows": -1}, ("max_rows", "-1")),
]
ROUTE: Table = [
    ({"top_k": 0}, ("top_k", "1", "0")),
    ({"top_k": 7}, ("top_k", "num_experts", "6", "7")),
    ({"score_function": "tanh"}, ("score_function", "sqrtsoftplus", "tanh")),
    ({"group_score": "mean"}, ("group_score", "top2", "mean")),
    ({"normalization": "l2"}, ("normalization", "softmax", "l2")),
    ({"num_groups": 4}, ("num_groups", "num_experts", "6", "4")),
    ({"num_groups": 0}, ("num_groups", "0")),
    ({"num_groups": 2, "top_k_groups": 3}, ("top_k_groups", "2", "3")),
    ({"top_k_groups": 0}, ("top_k_groups", "0")),
    ({"num_groups": 3, "top_k": 3}, ("top_k", "2", "top_k_groups", "1", "3")),
    ({"correction_bias": torch.zeros(5)}, ("correction_bias", "6", "[5]")),
    ({"correction_bias": zeros(6)}, ("correction_bias", "float64", "Long")),
    ({"correction_bias": torch.zeros(6, device="meta")}, ("correction_bias", "cpu", "meta")),
    ({"correction_bias": torch.tensor([0.0] * 5 + [NAN])}, ("correction_bias must be numbers, got NaN",)),
    ({"logits": torch.tensor([[0.0] * 6, [0.0] * 5 + [NAN]])}, ("logits", "NaN", "1", "2")),
    ({"logits": torch.full((1, 6), -INFINITY)}, ("logits", "NaN")),
    ({"logits": torch.tensor([[INFINITY] + [0.0] * 5])}, ("logits", "NaN")),
]
FFN: Table = [
    ({"weights": torch.randn(20, 2)}, ("weights", "60", "[20, 2]")),
    ({"gate": torch.randn(8, 12, 7)}, ("gate", "6", "[8, 12, 7]")),
    ({"gate": torch.randn(8, 12, 6).double()}, ("gate", "Float", "Double")),
    ({"up": torch.randn(8, 11, 6)}, ("up", "12", "[8, 11, 6]")),
    ({"up": torch.randn(8, 12, 6).double()}, ("up", "Float", "Double")),
    ({"down": torch.randn(8, 12, 6)}, ("down", "[8, 12, 6]")),
    ({"down": torch.randn(7, 6, 12)}, ("down", "8", "[7, 6, 12]")),
    ({"gate_bias": torch.randn(8, 5)}, ("gate_bias", "6", "[8, 5]")),
    ({"gate": None, "gate_bias": torch.randn(8, 6)}, ("gate_bias", "gate")),
    ({"down_bias": torch.randn(8, 6)}, ("down_bias", "12", "[8, 6]")),
    ({"activation": "swish"}, ("activation", "silu", "swish")),
    ({"activation": "swigluoai", "gate": None}, ("activation", "swigluoai", "gate")),
    ({"limit": 0.0}, ("limit", "0")),
    ({"limit": 1.0, "gate": None}, ("limit", "gate")),
    ({"limit": 1.0, "limit_target": "gate"}, ("limit_target", "input, output", "gate")),
    ({"limit_target": "output"}, ("limit", "limit_target output", "None")),
    ({**activations.SITU, "gate": None}, ("gate", "situ", "None")),
    ({**activations.SITU, "limit": 7.0}, ("limit", "situ", "7")),
    ({**activations.SITU, "up_softcap": None}, ("up_softcap", "situ", "None")),
    ({**activations.SITU, "gate_softcap": -4.0}, ("gate_softcap", "positive", "-4")),
    ({**activations.SITU, "up_softcap": INFINITY}, ("up_softcap", "finite", "inf")),
    ({"gate_softcap": 4.0}, ("gate_softcap", "silu", "4")),
    ({"fused_gate": "split", "gate": None}, ("fused_gate", "interleaved", "split")),
    ({"fused_gate": "interleaved"}, ("gate", "interleaved", "[8, 12, 6]")),
    ({"fused_gate": "interleaved", "gate": None, "up": torch.randn(8, 12, 5)}, ("up", "2F", "[8, 12, 5]")),
    ({"fused_gate": "interleaved", "gate": None}, ("down", "3", "[8, 6, 12]")),
    ({"plan.slots": number(60, 60)}, ("slots", "60")),
    ({"plan.rows": zeros(59)}, ("rows", "60", "59")),
    ({"plan.group_sizes": number(8, 8)}, ("group_sizes", "60", "8")),
    ({"plan.group_sizes": torch.tensor([61, -1, 0, 0, 0, 0, 0, 0])}, ("group_sizes", "60", "61")),
    ({"plan.group_sizes": torch.tensor([60])}, ("up", "1", "group_sizes", "[8, 12, 6]")),
    ({"plan.top_k": 2}, ("weights", "40", "[20, 3]")),
]


def ffn_arguments() -> dict[str, Any]:
    return ffn_call(SKEWED, bias=False).cast(torch.float32).arguments


def of_index(**tensors: Tensor) -> dict[str, Any]:
    return {**tensors, "index": zeros(6), "group_size": 2}


CASES: dict[str, tuple[Callable[[], dict[str, Any]], Table]] = {
    "gmm": (
        lambda: {"lhs": torch.randn(6, 4), "rhs": torch.randn(2, 4, 5), "group_sizes": torch.tensor([2, 3])},
        GMM,
    ),
    "tgmm": (
        lambda: (
            {"lhs": torch.randn(6, 4), "rhs": torch.randn(6, 3), "group_sizes": torch.tensor([2, 3])}
            | {"num_local_groups": 2}
        ),
        TGMM,
    ),
    "linear": (lambda: {"x": torch.randn(6, 4), "weight": torch.randn(5, 4), "bias": torch.randn(5)}, LINEAR),
    "ragged_gather": (lambda: {"x": torch.randn(5, 3), "index": zeros(4)}, GATHER),
    "ragged_gather_reduce": (lambda: of_index(rows=torch.randn(5, 3)), GATHER_REDUCE),
    "ragged_scatter_add": (lambda: of_index(rows=torch.randn(3, 5)) | {"num_rows": 7}, SCATTER_ADD),
    "ragged_dot": (lambda: of_index(a=torch.randn(3, 5), b=torch.randn(7, 5)), DOT),
    "ragged_sort": (lambda: {"x": torch.randn(20, 4), "plan": ops.ragged_plan(SKEWED.experts(), 8)}, SORT),
    "ragged_unsort": (lambda: {"rows": torch.randn(60, 4), "plan": ops.ragged_plan(SKEWED.experts(), 8)}, UNSORT),
    "ragged_plan": (lambda: {"experts": zeros(3, 2), "num_experts": 5}, PLAN),
    "route": (lambda: {"logits": torch.randn(4, 6), "top_k": 2}, ROUTE),
    "expert_ffn": (ffn_arguments, FFN),
}


@pytest.mark.parametrize("operator", CASES)
def test_refuses(path: str, operator: str) -> None:
    valid, table = CASES[operator]
    for changes, words in table:
        with named(changes), refusal(operator, *words):
            Call(operator, valid()).replace(**changes)()


def test_kernels_refuse_rows_of_no_group() -> None:
    """Plans on devices other than the CPU may have rows without a slot."""
    with refusal("expert_ffn", "group_sizes", "60", "56"):
        Call("expert_ffn", ffn_arguments()).replace(**{"plan.group_sizes": number(7, 8)})()


# Saved tensors


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_saved_tensors_that_come_back_in_another_dtype(every_path: str, dtype: torch.dtype) -> None:
    call = ffn_call(SKEWED).cast(torch.float32).trainable()
    given = {tensor.data_ptr() for tensor in call.tensors().values()}

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.data_ptr() not in given else tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        (out,) = call()
    with refusal("expert_ffn_backward", "preactivations", "Float"):
        out.sum().backward()


# Low-rank factors


@pytest.mark.parametrize("projection", ["gate", "up", "down", "rhs"])
def test_factors_of_other_sizes(path: str, projection: str) -> None:
    call = factored_gmm_call(SKEWED) if projection == "rhs" else with_factors(ffn_call(SKEWED))
    a, b = (call.arguments[f"{projection}_factors.{field}"] for field in "ab")
    inner = {"rhs": "D of lhs", "down": "F of up"}.get(projection, "D of x")
    for field, factor, *words in (
        ("a", torch.ones(len(a), a.shape[1] + 1, a.shape[2]), inner, a.shape[1], a.shape[1] + 1),
        ("a", a[1:], len(a), len(a) - 1),
        ("b", torch.ones(len(b), b.shape[1] + 1, b.shape[2]), "r of the other factor", b.shape[1], b.shape[1] + 1),
        ("b", b[..., 1:], b.shape[2], b.shape[2] - 1),
    ):
        with named(field, words), refusal(call.operator, f"{projection}_{field}", *words):
            call.replace(**{f"{projection}_factors.{field}": factor})()


def test_factors_of_a_gate_that_is_not_there(path: str) -> None:
    gated, plain = with_factors(ffn_call(SKEWED)), ffn_call(SKEWED, gated=False)
    fields = {name: value for name, value in gated.arguments.items() if name.startswith("gate_factors")}
    with refusal("expert_ffn", "gate_a", "must be None without gate"):
        plain.replace(**fields)()
