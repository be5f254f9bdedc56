"""MaxText's numbers: the reference against the fixtures of tests/golden.

Tolerance 2e-5 of the largest value: both sides are float32 and sum up to 40 products in different orders.
"""

import pytest
from torch import Tensor

from maxmoe import reference
from support import golden_fixtures


def assert_matches(got: Tensor | None, expected: Tensor, what: str) -> None:
    assert got is not None and got.shape == expected.shape, what
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < 2e-5, f"{what}: relative error {error:.2e}"


@pytest.mark.parametrize("name", golden_fixtures.LAYERS)
def test_layer(name: str) -> None:
    layer = golden_fixtures.layer(name)
    leaves = {"x": layer.x, **layer.parameters}
    leaves = {key: leaf.clone().requires_grad_(key in layer.gradients) for key, leaf in leaves.items()}
    out, *_ = reference.moe(leaves["x"], layer.config, leaves)
    assert_matches(out, layer.output, "out")
    (out * layer.cotangent).sum().backward()
    assert set(leaves) - set(layer.gradients) <= {"router.score_correction_bias"}
    for key, expected in layer.gradients.items():
        assert_matches(leaves[key].grad, expected, f"gradient of {key}")


def test_ragged_kernels() -> None:
    arrays, meta = golden_fixtures.load("ragged_kernels")
    x, index, weights = arrays["x"], arrays["indices"], arrays["weights"]
    bounds = {"start": meta["start"], "end": meta["end"]}
    assert_matches(reference.ragged_gather(x, index, **bounds), arrays["gather"], "gather")
    assert_matches(reference.ragged_gather(x, index, weights, **bounds), arrays["gather_weighted"], "weighted gather")
    reduced = reference.ragged_gather_reduce(
        x, index, meta["reduce_group_size"], weights, valid=arrays["reduce_mask"].bool()
    )
    assert_matches(reduced, arrays["gather_reduce"], "gather_reduce")


@pytest.mark.parametrize("name", ["gmm_full", "gmm_offset"])
def test_gmm(name: str) -> None:
    arrays, meta = golden_fixtures.load(name)
    lhs, rhs = arrays["lhs"].requires_grad_(), arrays["rhs"].requires_grad_()
    out = reference.gmm(lhs, rhs, arrays["group_sizes"], group_offset=meta["group_offset"])
    assert_matches(out, arrays["out"], "out")
    out.backward(arrays["cotangent"])
    assert_matches(lhs.grad, arrays["grad_lhs"], "gradient of lhs")
    assert_matches(rhs.grad, arrays["grad_rhs"], "gradient of rhs")


@pytest.mark.parametrize("name", ["ring_sort_full", "ring_sort_trunc"])
def test_ring_sort(name: str) -> None:
    """Each of four ranks sorts the rows of its experts; truncated buffers drop the last rows."""
    arrays, meta = golden_fixtures.load(name)
    num_local_experts = meta["E"] // meta["ep"]
    experts = arrays["topk_indices"]
    for rank in range(meta["ep"]):
        valid = arrays["valid"][rank].bool()
        plan = reference.ragged_plan(
            experts,
            meta["E"],
            first_expert=rank * num_local_experts,
            num_local_experts=num_local_experts,
            max_rows=meta["buffer_rows"],
        )
        assert len(plan.slots) == valid.sum()

        x = arrays["x"].clone().requires_grad_()
        rows = reference.ragged_sort(x, plan)
        assert_matches(rows, arrays["sorted_out"][rank][valid], "sorted rows")
        rows.backward(arrays["cot_sorted"][rank][valid])
        assert_matches(x.grad, arrays["grad_x_per_shard"][rank], "gradient of x")

        rows = arrays["unsort_in"][rank][valid].requires_grad_()
        weights = arrays["topk_weights"].reshape(experts.shape).clone().requires_grad_()
        out = reference.ragged_unsort(rows, plan, weights)
        assert_matches(out, arrays["unsort_out_per_shard"][rank], "unsorted rows")
        out.backward(arrays["cot_unsort"][rank])
        assert_matches(rows.grad, arrays["grad_unsort_in"][rank][valid], "gradient of rows")
        gradient = arrays["grad_topk_weights_true"][rank].reshape(experts.shape)
        assert_matches(weights.grad, gradient, "gradient of weights")
