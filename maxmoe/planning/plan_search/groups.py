"""Meshes to try, in groups that are planned at once, without those that cannot run the batch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from maxmoe.declaration import EXPERT_TOKEN_DIMS
from maxmoe.parallel.apply.sharded_tokens import activation_spec, token_sharding
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.planning.plan_search.candidates import Candidates, all_meshes, ordered_axes
from maxmoe.planning.plan_search.evaluation import Evaluation
from maxmoe.planning.plan_search.rule_tables import NamedRules
from maxmoe.planning.plan_search.settings import STRATEGIES
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh


class Group(NamedTuple):
    """Meshes with rules, and a strategy for experts on other ranks."""

    meshes: Candidates
    table: NamedRules
    dispatch: Dispatch


def groups(
    evaluation: Evaluation, world_size: int, tables: Sequence[NamedRules], excluded: Counter[str]
) -> Iterator[Group]:
    """Yield all meshes of `world_size` ranks; count those that cannot run the batch, by the reason."""
    for table in tables:
        axes = [axis for axis in ordered_axes(table.rules) if evaluation.parts.can_be_cut or axis != STAGE_AXIS]
        meshes = _that_can_run(all_meshes(world_size, axes), evaluation, table, excluded)
        mesh = Mesh.planned(dict.fromkeys(axes, 2))
        *_, of_experts = activation_spec(EXPERT_TOKEN_DIMS, mesh, table.rules)
        has_experts = meshes.product(of_experts) > 1
        if (~has_experts).any():
            yield Group(meshes.select(~has_experts), table, "auto")
        if has_experts.any():
            for dispatch in STRATEGIES:
                yield Group(meshes.select(has_experts), table, dispatch)


def _that_can_run(meshes: Candidates, evaluation: Evaluation, table: NamedRules, excluded: Counter[str]) -> Candidates:
    """Return the meshes that can be cut into stages and divide the tokens."""
    within = Mesh.planned({axis: 2 for axis in meshes.sizes if axis != STAGE_AXIS})
    batch_axes, length_axes = token_sharding(within, table.rules).spec
    batch_size, length = evaluation.step[:2]
    stages, parts = meshes.product([STAGE_AXIS]), meshes.product(batch_axes)
    reasons = {
        "more stages than blocks": stages > max(1, evaluation.parts.num_blocks),
        f"batch_size ({batch_size}) is not divisible": batch_size % parts != 0,
        f"sequence_length ({length}) is not divisible": length % meshes.product(length_axes) != 0,
        "fewer sequences on a rank than stages": (stages > 1) & (batch_size // parts < stages),
    }
    rest = torch.ones(len(meshes), dtype=torch.bool)
    for reason, mask in reasons.items():
        if number := int((rest & mask).sum()):
            excluded[reason] += number
        rest &= ~mask
    return meshes.select(rest)
