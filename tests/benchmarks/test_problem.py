"""The inputs of the benchmarks: routing, local experts."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import local, rows_per_expert, shapes
from benchmarks.problem import balanced, make_problem


def test_the_problem_is_skewed_and_its_weights_exact() -> None:
    problem = make_problem(shapes.B, torch.bfloat16)
    load = problem.experts.flatten().bincount(minlength=64).float()
    logits = torch.randn(2048, 64) + torch.linspace(1.5, 0, 64)
    skewed = logits.topk(8).indices.flatten().bincount(minlength=64).float()
    assert float((load - skewed).norm() / skewed.norm()) < 0.1
    assert torch.equal(problem.weights, problem.weights.bfloat16().float())


def test_local_experts_are_a_typical_block() -> None:
    problem = make_problem(shapes.B, torch.float32)
    count, first, num_rows = local.typical_block(problem)
    chosen = (problem.experts >= first) & (problem.experts < first + count)
    assert (count, first % 8, int(chosen.sum())) == (8, 0, num_rows)
    assert num_rows / problem.experts.numel() == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize("shape", [shapes.B, shapes.Shape(0, 32, 8, 10, 4)])
def test_points_have_the_rows_per_expert_that_they_say(shape: shapes.Shape) -> None:
    points = rows_per_expert.points(shape, "forward")[:4]
    for rows, point in zip(rows_per_expert.ROWS_PER_EXPERT, points, strict=False):
        problem = balanced(make_problem(point._replace(hidden_size=16, intermediate_size=8), torch.float32))
        load = problem.experts.flatten().bincount(minlength=shape.num_experts)
        assert (int(load.min()), int(load.max()) <= rows + 1) == (rows, True)
        assert all(len(set(chosen)) == shape.top_k for chosen in problem.experts.tolist())
