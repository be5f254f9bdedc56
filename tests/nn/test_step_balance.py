"""Counts of a step, added in the backwards of several threads."""

import torch

from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.nn.step_balance import dot_frequencies
from support.threads import in_threads


def test_backwards_of_two_threads_are_all_counted() -> None:
    """An addition to many counts takes long enough to overlap with another one."""
    num_experts, num_backwards = 200_000, 500
    counts = StepCounts(num_experts, torch.device("cpu"))
    mass, own = torch.ones(num_experts, requires_grad=True), torch.ones(num_experts, dtype=torch.int64)

    def backwards() -> None:
        for _ in range(num_backwards):
            torch.autograd.grad(dot_frequencies(mass, own, torch.tensor(1), counts), mass)

    in_threads(backwards, backwards)
    assert (counts.sums == 2 * num_backwards).all()
