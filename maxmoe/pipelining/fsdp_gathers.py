"""How often FSDP2 gathers the parameters of each stage in a step."""

from collections.abc import Sequence

from maxmoe.pipelining.schedules import ScheduleKind
from maxmoe.pipelining.timeline import BACKWARD_WEIGHT, FORWARD, Action

# Stages whose parameters torch gathers ahead of their next actions.
NUM_AHEAD = 3


def fsdp_gathers(actions: Sequence[Action], kind: ScheduleKind) -> dict[int, dict[str, int]]:
    """Count the all-gathers of a parameter in the forwards and in the backwards of each stage of a rank.

    A schedule with one stage per rank gathers parameters when a forward or a backward needs them. All other schedules
    gather the parameters of the next three stages ahead, and free the parameters of the other stages. The parameters
    are freed after each forward, unless the backward is split, and stay after each backward. Returns the numbers by
    stage and by the purpose of the collective.
    """
    stages = {action.stage for action in actions}
    gathers = {stage: {"weights, forward": 0, "weights, backward": 0} for stage in stages}
    gathered: set[int] = set()
    ahead: list[int] = []
    for index, action in enumerate(actions):
        purpose = "weights, forward" if action.kind == FORWARD else "weights, backward"
        if not kind.has_one_stage:
            following = list(dict.fromkeys(later.stage for later in actions[index:]))[:NUM_AHEAD]
            for stage in following:
                gathers[stage]["weights, forward"] += stage not in ahead and stage not in gathered
            gathered = (gathered & set(following)) | (set(following) - set(ahead))
            ahead = following
        if action.kind != BACKWARD_WEIGHT and action.stage not in gathered:
            gathers[action.stage][purpose] += 1
        gathered.add(action.stage)
        if action.kind == FORWARD and not kind.splits_backward:
            gathered.remove(action.stage)
    return gathers
