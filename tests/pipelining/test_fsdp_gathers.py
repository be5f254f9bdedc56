"""The number of all-gathers of FSDP2 in stages, against the actions that torch adds to a schedule."""

from collections import Counter

import pytest
from torch.distributed.pipelining import schedules

from maxmoe.pipelining.fsdp_gathers import fsdp_gathers
from maxmoe.pipelining.schedules import SCHEDULES
from maxmoe.pipelining.timeline import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, schedule_order

TORCH = schedules._ComputationType
KINDS = {FORWARD: TORCH.FORWARD, BACKWARD_INPUT: TORCH.BACKWARD_INPUT, BACKWARD_WEIGHT: TORCH.BACKWARD_WEIGHT}
KINDS["backward"] = TORCH.FULL_BACKWARD


@pytest.mark.parametrize("stages_per_rank", [2, 4, 5])
def test_stages_are_gathered_ahead_as_by_torch(stages_per_rank: int) -> None:
    """A split backward keeps parameters after a forward, so that there are no other gathers."""
    schedule = "interleaved_zero_bubble"
    for actions in schedule_order(schedule, 2, stages_per_rank, 4):
        theirs = [schedules._Action(action.stage, KINDS[action.kind], action.micro_batch) for action in actions]
        with_gathers = schedules._add_unshard_reshard(theirs)
        expected = Counter(each.stage_index for each in with_gathers if each.computation_type == TORCH.UNSHARD)
        gathers = fsdp_gathers(actions, SCHEDULES[schedule])
        assert {stage: sum(numbers.values()) for stage, numbers in gathers.items()} == expected
