"""`explain` for Mixture-of-Experts layers: strategy, reason, axes, experts per rank, collectives."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from maxmoe import MoE, ZeroComputation
from maxmoe.costs import estimate, explain
from maxmoe.costs.explain import Explanation
from maxmoe.models import Decoder
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh
from support.parallel_decoder import CONFIG, MOE

STEP = {"batch_size": 8, "sequence_length": 8}
DEEP = replace(CONFIG, num_layers=5)


def explained(rules: str, sizes: dict[str, int], dispatch: Dispatch = "auto", **options: Any) -> Explanation:
    model = Decoder(DEEP, device="meta", dtype=torch.bfloat16)
    return explain(model, Mesh.planned(sizes), rules, dispatch=dispatch, **options)


@pytest.mark.parametrize(
    ("rules", "sizes", "dispatch", "reason", "axes", "num_local_experts"),
    [
        ("ep-as-dp", {"expert": 2}, "ring_of_experts", "2 copies of a token are no more", "tokens sent over expert", 4),
        ("ep-as-dp", {"expert": 4}, "ragged_all_to_all", "are fewer bytes than 4 copies", "tokens sent over expert", 2),
        (
            "cp-as-ep",
            {"context": 2, "expert": 4},
            "ragged_all_to_all",
            "8 copies",
            "tokens sent over context expert",
            1,
        ),
        ("ep-tp", {"expert": 2}, "ring_of_experts", "one all-reduce", "tokens replicated over expert", 4),
        ("pure-fsdp", {"fsdp": 2}, "gather_weights", "no axis of the mesh", "  -  ", 8),
        ("default", {"tensor": 2}, "gather_weights", "no axis of the mesh", "tensor parallelism over tensor", 8),
    ],
)
def test_strategy_reason_and_axes(
    rules: str,
    sizes: dict[str, int],
    dispatch: str,
    reason: str,
    axes: str,
    num_local_experts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    explanation = explained(rules, sizes)
    assert list(explanation.dispatch) == [f"blocks.{number}.feed_forward" for number in range(1, 5)]
    assert {plan.strategy for plan in explanation.dispatch.values()} == {dispatch}
    assert {plan.num_local_experts for plan in explanation.dispatch.values()} == {num_local_experts}
    monkeypatch.setenv("COLUMNS", "1000")
    (row,) = str(explanation).split("\n\n")[-1].splitlines()[2:]
    assert row.startswith("blocks.1-4.feed_forward x4  ")
    assert reason in row and axes in row and f"{num_local_experts} of 8" in row


@pytest.mark.parametrize(
    ("num_copies", "dispatch", "reason"),
    [
        (7, "ring_of_experts", "2 copies of a token are no more bytes than 2.13 of top_k (4) rows"),
        (8, "ragged_all_to_all", "2.4 of top_k (4) rows of a token are fewer bytes than 3 copies"),
    ],
)
def test_rows_of_copy_experts_are_not_counted(num_copies: int, dispatch: str, reason: str) -> None:
    moe = replace(MOE, top_k=4, zero_computation=ZeroComputation(copy=num_copies))
    size = 2 if dispatch == "ring_of_experts" else 3
    model = Decoder(replace(CONFIG, moe=replace(moe, num_experts=size * 4)), device="meta")
    for plan in explain(model, Mesh.planned({"expert": size}), "ep-as-dp").dispatch.values():
        assert (plan.strategy, plan.reason) == (dispatch, reason)


def test_sizes_are_those_of_the_tensors() -> None:
    """By hand: 8 * 8 tokens on 8 ranks, D=16, K=2, 4 ranks in a ring."""
    layer, mesh = MoE(MOE, device="meta", dtype=torch.bfloat16), Mesh.planned({"fsdp": 2, "expert": 4})
    strategies: tuple[Dispatch, ...] = ("ring_of_experts", "ragged_all_to_all")

    def hidden_states(*tokens: int) -> tuple[torch.Tensor]:
        return (torch.empty(*tokens, 16, dtype=torch.bfloat16, requires_grad=True),)

    costs = [estimate(layer, mesh, "ep-as-dp", dispatch=each, inputs=hidden_states, **STEP) for each in strategies]
    # Without the sums of losses and gradients.
    bytes_of = [
        {row.purpose: row.bytes for row in cost.traffic if row.axis == "expert" and row.kind != "all-reduce"}
        for cost in costs
    ]
    tokens, rows, weights, ids = 4 * 8 * 16 * 2, 8 * 2 * 16 * 2, 4 * 8 * 2 * 4, 4 * 8 * 2 * 4
    assert bytes_of[0] == {
        "row counts, forward": 3 * 2 * 8,
        "expert ids, forward": ids * 3 // 4,
        **dict.fromkeys(("tokens to experts, forward", "tokens to experts, backward"), tokens * 3 // 4),
        **dict.fromkeys(("outputs of experts, forward", "outputs of experts, backward"), tokens * 3 // 4),
        **dict.fromkeys(("routing weights, forward", "routing weights, backward"), weights * 3 // 4),
    }
    assert bytes_of[1] == {
        "row counts, forward": 3 * (8 + 1) * 8,
        **dict.fromkeys(("tokens to experts, forward", "tokens to experts, backward"), rows * 3 // 4),
        **dict.fromkeys(("outputs of experts, forward", "outputs of experts, backward"), rows * 3 // 4),
        **dict.fromkeys(("routing weights, forward", "routing weights, backward"), 8 * 2 * 4 * 3 // 4),
    }


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="num_chunks must be a positive int, got 0"):
        explained("ep-as-dp", {"expert": 4}, num_chunks=0)
    with pytest.raises(ValueError, match=r"batch_size \(6\) must be divisible by expert=4"):
        estimate(MoE(MOE, device="meta"), Mesh.planned({"expert": 4}), "ep-as-dp", batch_size=6, sequence_length=8)
