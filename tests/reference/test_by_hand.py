"""The specification, against numbers worked out by hand."""

from typing import Any

import pytest
import torch

from maxmoe import reference
from support import golden_fixtures

NEVER = float("-inf")


def select(row: list[float], top_k: int, **options: Any) -> list[int]:
    """The experts chosen for one token whose scores are `row`."""
    logits = torch.tensor([row], dtype=torch.float64)
    _, experts, _ = reference.route(logits, top_k, score_function="identity", normalization="none", **options)
    return experts[0].tolist()


# route


def test_route_takes_the_largest_and_the_lowest_index_of_equals() -> None:
    assert select([1.0, 3.0, 2.0, 3.0], 3) == [1, 3, 2]
    assert select([5.0] * 6, 3) == [0, 1, 2]


def test_route_groups_count_their_two_best() -> None:
    # Groups (9, 0, 0), (5, 5, 0): the second has the larger sum of two, though not the best expert.
    assert select([9.0, 0.0, 0.0, 5.0, 5.0, 0.0], 2, num_groups=2) == [3, 4]
    # The score of a group of one expert is the expert's score.
    assert select([9.0, 0.0, 0.0, 5.0, 5.0, 0.0], 2, num_groups=2, group_score="max") == [0, 1]
    assert select([1.0, 4.0, 3.0], 2, num_groups=3, top_k_groups=2) == [1, 2]
    assert select([1.0, 1.0, 1.0, 1.0], 2, num_groups=2) == [0, 1]


def test_route_never_leaves_the_best_groups() -> None:
    # An expert of the best group with score -inf is selected before any expert of the other group.
    assert select([9.0, NEVER, 9.0, 1.0, 1.0, 1.0], 3, num_groups=2) == [0, 2, 1]


@pytest.mark.parametrize(
    ("score_function", "normalization", "expected"),
    [
        ("softmax", "none", [3 / 6, 2 / 6]),
        ("softmax", "sum", [3 / 5, 2 / 5]),
        ("sigmoid", "none", [3 / 4, 2 / 3]),
        ("sigmoid", "sum", [9 / 17, 8 / 17]),
        ("identity", "none", [1.0986122886681098, 0.6931471805599453]),
        ("identity", "softmax", [3 / 5, 2 / 5]),
        ("sqrtsoftplus", "none", [1.1774100225154747, 1.0481470739682051]),
    ],
)
def test_route_weights(score_function: Any, normalization: Any, expected: list[float]) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64).log()
    weights, _, _ = reference.route(logits, 2, score_function=score_function, normalization=normalization)
    torch.testing.assert_close(weights, torch.tensor([expected], dtype=torch.float64), rtol=1e-14, atol=0)


# plan and rows


def test_plan_orders_by_expert_then_slot() -> None:
    experts = torch.tensor([[2, 0], [-1, 2], [0, 1]])
    plan = reference.ragged_plan(experts, 3)
    assert plan.slots.tolist() == [1, 4, 5, 0, 3]
    assert plan.rows.tolist() == [3, 0, -1, 4, 1, 2]
    assert plan.group_sizes.tolist() == [2, 1, 2]
    assert (plan.dropped.item(), plan.top_k) == (0, 2)


def test_gmm_zeroes_the_rows_of_no_local_group() -> None:
    lhs = torch.arange(1.0, 6.0)[:, None]
    out = reference.gmm(lhs, torch.tensor([[[10.0]], [[100.0]]]), torch.tensor([1, 2, 1]), group_offset=1)
    assert out.flatten().tolist() == [0.0, 20.0, 30.0, 400.0, 0.0]
    out = reference.tgmm(lhs, lhs, torch.tensor([1, 2, 1]), 2, group_offset=1)
    assert out.flatten().tolist() == [13.0, 16.0]


def test_activations() -> None:
    gate, up = torch.tensor([-1.0, 2.0, 9.0]), torch.tensor([3.0, -9.0, 9.0])
    sigmoid = torch.sigmoid
    expected = {
        "silu": gate * sigmoid(gate) * up,
        "gelu": gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up,
        "gelu_tanh": gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up,
        "relu": torch.tensor([0.0, -18.0, 81.0]),
        "relu2": torch.tensor([0.0, -36.0, 729.0]),
        "swigluoai": gate * sigmoid(1.702 * gate) * (up + 1),
    }
    for activation, value in expected.items():
        torch.testing.assert_close(reference.activate(gate, up, activation=activation), value)  # type: ignore[arg-type]
    assert reference.activate(None, gate, activation="relu2").tolist() == [0.0, 4.0, 81.0]
    limited = reference.activate(gate, up, activation="relu", limit=7.0)
    assert limited.tolist() == [0.0, -14.0, 49.0]


# losses and capacity


def test_load_balance_loss_is_one_at_balance() -> None:
    logits = torch.zeros(2, 6, 3)
    experts = torch.tensor([[0, 1], [2, 0], [1, 2]]).repeat(2, 2, 1)
    for score_function in ("softmax", "sigmoid", "sqrtsoftplus", "identity"):
        for scope in ("sequence", "batch"):
            loss = reference.load_balance_loss(logits, experts, score_function=score_function, scope=scope)
            torch.testing.assert_close(loss, torch.tensor(1.0))


def test_load_balance_scope() -> None:
    # Either sequence has its own favourite: unbalanced one by one (f = 2, P = 3/4), balanced together.
    logits = torch.tensor([[[3.0, 1.0]], [[1.0, 3.0]]]).log()
    experts = torch.tensor([[[0]], [[1]]])
    sequence = reference.load_balance_loss(logits, experts, score_function="softmax", scope="sequence")
    batch = reference.load_balance_loss(logits, experts, score_function="softmax", scope="batch")
    torch.testing.assert_close(sequence, torch.tensor(1.5))
    torch.testing.assert_close(batch, torch.tensor(1.0))


def test_router_z_loss() -> None:
    logits = torch.tensor([[1.0, 3.0], [2.0, 2.0]]).log()
    expected = torch.tensor(4.0).log() ** 2
    torch.testing.assert_close(reference.router_z_loss(logits), expected)


def test_capacity_is_maxtexts() -> None:
    arrays, meta = golden_fixtures.load("capacity_masks")
    sequences = arrays["topk_indices"]
    kept = torch.stack([reference.apply_capacity(part, meta["E"], meta["capacity_factor"]) for part in sequences])
    used = torch.zeros(meta["B"], meta["S"], meta["E"], dtype=torch.bool)
    for b, s, k in (kept >= 0).nonzero().tolist():
        used[b, s, kept[b, s, k]] = True
    assert torch.equal(used, arrays["dispatch_mask"].any(-1))
    assert (kept < 0).any()
