"""Counts of a step, added in the backwards of several threads."""

import torch

from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.nn import LocalTokens
from maxmoe.nn.step_balance import step_balance_loss
from support.threads import in_threads


def test_backwards_of_two_threads_are_all_counted() -> None:
    """An addition to many counts takes long enough to overlap with another one."""
    num_experts, num_backwards = 200_000, 80
    counts = StepCounts(num_experts, torch.device("cpu"))
    probabilities = torch.ones(1, num_experts, requires_grad=True)
    own, one, tokens = torch.ones(num_experts, dtype=torch.int64), torch.tensor(1), LocalTokens()

    def backwards() -> None:
        for _ in range(num_backwards):
            loss = step_balance_loss(probabilities, own, 1, one, counts, 1.0, tokens=tokens)
            torch.autograd.grad(loss, probabilities)

    in_threads(backwards, backwards)
    assert (counts.sums == 2 * num_backwards).all()
