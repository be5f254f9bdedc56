"""The operators of backward passes check their arguments, as all others do."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from maxmoe import ops
from support.ffn_call import ffn_call
from support.operator_calls import Call, refusal, short
from support.shapes import SKEWED


def ffn_arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of torch.ops.maxmoe.expert_ffn_backward, in float32: T 20, K 3, D 12, F 6, 8 experts."""
    arguments = ffn_call(SKEWED, bias=False).cast(torch.float32).arguments
    plan = arguments.pop("plan")
    grad_out, preactivations = torch.randn(20, 12), torch.randn(len(plan.slots), 12)
    mask = [True, True, *[True, False, False, False] * 3]
    rows = {"preactivations": preactivations, "reduced": torch.randn(60, 0), "gate_preactivations": torch.randn(60, 0)}
    given = {"grad_out": grad_out, **rows, "output_mask": mask}
    routed = {"slots": plan.slots, "rows": plan.rows, "group_sizes": plan.group_sizes, "top_k": plan.top_k}
    return {**given, **arguments, **routed, **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"preactivations": torch.randn(60, 12).bfloat16()}, ("preactivations", "Float", "BFloat16")),
        ({"preactivations": torch.randn(60, 12).half()}, ("preactivations", "Float", "Half")),
        ({"preactivations": torch.randn(60, 12).double()}, ("preactivations", "Float", "Double")),
        ({"preactivations": torch.randn(60, 6)}, ("preactivations", "12", "[60, 6]")),
        ({"preactivations": torch.randn(59, 12)}, ("preactivations", "60", "[59, 12]")),
        ({"preactivations": torch.randn(60 * 12)}, ("preactivations", "[R, 2F]", "[720]")),
        ({"preactivations": torch.randn(60, 12, device="meta")}, ("preactivations", "cpu", "meta")),
        ({"grad_out": torch.randn(20, 12).half()}, ("grad_out", "Float", "Half")),
        ({"grad_out": torch.randn(20, 12).double()}, ("grad_out", "Float", "Double")),
        ({"grad_out": torch.randn(1, 12)}, ("grad_out", "20", "[1, 12]")),
        ({"grad_out": torch.randn(20, 11)}, ("grad_out", "12", "[20, 11]")),
        ({"grad_out": torch.randn(240)}, ("grad_out", "[T, D]", "[240]")),
        ({"gate_preactivations": torch.randn(60, 6)}, ("gate_preactivations", "width", "0", "[60, 6]")),
        ({"reduced": torch.randn(60, 3)}, ("reduced", "r of gate", "0", "[60, 3]")),
        ({"reduced": torch.randn(59, 0)}, ("reduced", "60", "[59, 0]")),
        ({"reduced": torch.randn(60, 0).half()}, ("reduced", "Float", "Half")),
        ({"output_mask": [True] * 14}, ("output_mask", "gate_bias", "None")),
        ({"output_mask": [False] * 11 + [True] + [False] * 2}, ("output_mask", "down_bias", "None")),
        ({"output_mask": [False] * 13 + [True]}, ("output_mask", "down_b", "None")),
        ({"weights": None}, ("output_mask", "weights", "None")),
        ({"gate": None, "preactivations": torch.randn(60, 6)}, ("output_mask", "gate", "None")),
        ({"slots": torch.full((60,), 10**9)}, ("slots", "60", "1000000000")),
        ({"rows": torch.full((60,), 10**9)}, ("rows", "60", "1000000000")),
        ({"down": torch.randn(8, 6, 12, device="meta")}, ("down", "cpu", "meta")),
        ({"top_k": 2**62}, ("top_k", str(2**62))),
        ({"x": None}, ("x", "tensor", "None")),
    ],
    ids=short,
)
def test_expert_ffn_backward_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    with refusal("expert_ffn_backward", *named):
        torch.ops.maxmoe.expert_ffn_backward(**ffn_arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"experts": torch.full((8, 2), 10**9)}, ("experts", "4", "1000000000")),
        ({"experts": torch.full((8, 2), -2)}, ("experts", "4", "-2")),
        ({"grad_probabilities": torch.randn(8, 2)}, ("grad_probabilities", "4", "[8, 2]")),
        ({"experts": torch.zeros(8, 2)}, ("experts", "int64", "Float")),
        ({"experts": torch.zeros(7, 2, dtype=torch.int64)}, ("experts", "8", "[7, 2]")),
        ({"grad_weights": torch.randn(1, 1)}, ("grad_weights", "8", "[1, 1]")),
        ({"grad_weights": torch.randn(8, 3)}, ("grad_weights", "2", "[8, 3]")),
        ({"grad_weights": torch.zeros(8, 2, dtype=torch.int64)}, ("grad_weights", "float64", "Long")),
        ({"logits": torch.randn(32)}, ("logits", "[T, E]", "[32]")),
        ({"logits": torch.randn(8, 4, device="meta")}, ("logits", "cpu", "meta")),
        ({"score_function": "tanh"}, ("score_function", "sqrtsoftplus", "tanh")),
        ({"normalization": "l2"}, ("normalization", "softmax", "l2")),
    ],
    ids=short,
)
def test_route_backward_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = {
        "grad_weights": torch.randn(8, 2),
        "grad_probabilities": torch.randn(8, 4),
        "logits": torch.randn(8, 4),
        "experts": torch.tensor([[0, 1]] * 8),
        "score_function": "softmax",
        "normalization": "sum",
        "scale": 1.0,
    }
    with refusal("route_backward", *named):
        torch.ops.maxmoe.route_backward(**{**arguments, **changes})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_saved_tensors_that_come_back_in_another_dtype(every_path: str, dtype: torch.dtype) -> None:
    call = ffn_call(SKEWED).cast(torch.float32).trainable()
    given = {tensor.data_ptr() for tensor in call.tensors().values()}

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.data_ptr() not in given else tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        (out,) = call()
    with refusal("expert_ffn_backward", "preactivations", "Float"):
        out.sum().backward()


def meta_calls() -> list[tuple[Call, str]]:
    call = ffn_call(SKEWED).cast(torch.float32)
    return [(call, name) for name in call.tensors()]


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize(("call", "name"), meta_calls(), ids=lambda value: value if isinstance(value, str) else "")
def test_one_tensor_on_meta(every_path: str, call: Call, name: str, trained: bool) -> None:
    """A parameter that was never loaded."""
    call = call.replace(**{name: call.arguments[name].to("meta")})
    with refusal("expert_ffn", "cpu", "meta"):
        (call.trainable() if trained else call)()


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)], ids=str)
def test_empty_results_of_any_number_of_groups(every_path: str, sizes: tuple[int, int]) -> None:
    lhs, rhs = torch.randn(5, sizes[0]), torch.randn(5, sizes[1])
    for group_offset in (0, 2**63 - 1, -(2**63)):
        out = ops.tgmm(lhs, rhs, torch.tensor([2, 3]), 2**40, group_offset=group_offset)
        assert out.shape == (2**40, *sizes)


@pytest.mark.parametrize("group_offset", [2**63 - 1, -(2**63)])
def test_groups_that_are_far_away(every_path: str, group_offset: int) -> None:
    lhs, sizes = torch.randn(5, 3), torch.tensor([2, 3])
    assert not ops.gmm(lhs, torch.randn(2, 3, 4), sizes, group_offset=group_offset).any()
    assert not ops.tgmm(lhs, lhs, sizes, 2, group_offset=group_offset).any()
