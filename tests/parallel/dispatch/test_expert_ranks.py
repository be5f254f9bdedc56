"""The plan by which a rank sends rows to the experts of the ranks in its group."""

from typing import Any

import torch

from maxmoe.nn.local_dispatcher import LocalExperts
from maxmoe.nn.routing import TopK
from maxmoe.parallel.dispatch.expert_ranks import ExpertRanks

NO_GROUP: Any = None  # the plan does not communicate


def test_the_plan_of_a_group_with_some_experts_in_another_order() -> None:
    """Padding, and experts of ranks outside of the group, have no row."""
    ranks = ExpertRanks(NO_GROUP, LocalExperts(first=4, count=2, total=6, num_selectable=6), first_experts=(4, 0))
    experts = torch.tensor([[5, 0], [-1, -1], [2, 1], [0, 3]])
    plan = ranks.plan(TopK(torch.ones(4, 2), experts, is_unpadded=False))
    assert plan.group_sizes.tolist() == [0, 1, 2, 1]  # of the experts 4, 5, 0, 1
    assert plan.slots.tolist()[:4] == [0, 1, 6, 5]
    assert plan.rows.tolist() == [0, 1, -1, -1, -1, 3, 2, -1]
