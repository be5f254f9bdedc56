"""Meshes to try, in groups that are planned at once, without those that cannot run the batch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe.declaration import declaration_of
from maxmoe.parallel.dispatch_plan import EXPERT_TOKEN_DIMS, Dispatch
from maxmoe.parallel.sharded_tokens import activation_spec, token_sharding
from maxmoe.planning.plan_search.candidates import Candidates, candidates, ordered_axes, with_micro_batches
from maxmoe.planning.plan_search.evaluation import Evaluation
from maxmoe.planning.plan_search.rule_tables import Effects, Table
from maxmoe.planning.plan_search.settings import STRATEGIES
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh


class Group(NamedTuple):
    """Meshes with the same axes, rules, and a strategy for experts on other ranks."""

    meshes: Candidates
    table: Table
    dispatch: Dispatch


def groups(
    evaluation: Evaluation, world_size: int, tables: Sequence[Table], excluded: Counter[str]
) -> Iterator[Group]:
    """Yield all meshes of `world_size` ranks; count those that cannot run the batch, by the reason."""
    parts, effects = evaluation.parts, Effects(evaluation.parts.model)
    can_be_cut = parts.has_blocks and declaration_of(parts.model).residual_stream is not None
    for table in tables:
        axes = [axis for axis in ordered_axes(table.rules) if can_be_cut or axis != STAGE_AXIS]
        for meshes, num_without in candidates(world_size, axes, parts.num_blocks):
            _count(excluded, "more stages than blocks", num_without)
            if effects.same_as(table, tuple(meshes.sizes)) is not None:
                _count(excluded, "the same plan by other rules", len(meshes))
                continue
            meshes = _that_divide(meshes, evaluation, table, excluded)
            for dispatch in _strategies(meshes, table) if len(meshes) else ():
                yield Group(meshes, table, dispatch)


def _that_divide(meshes: Candidates, evaluation: Evaluation, table: Table, excluded: Counter[str]) -> Candidates:
    """Return the meshes that divide the tokens, with every number of micro-batches."""
    within = Mesh.planned({axis: 2 for axis in meshes.sizes if axis != STAGE_AXIS})
    batch_axes, length_axes = token_sharding(within, table.rules).spec
    batch_size, length = evaluation.step[:2]

    def keep(mask: Tensor, reason: str) -> Candidates:
        _count(excluded, reason, int((~mask).sum()))
        return meshes.select(mask)

    meshes = keep(batch_size % meshes.product(batch_axes) == 0, f"batch_size ({batch_size}) is not divisible")
    meshes = keep(length % meshes.product(length_axes) == 0, f"sequence_length ({length}) is not divisible")
    if not meshes.has_stages:
        return meshes
    rows = torch.tensor(batch_size) // meshes.product(batch_axes)
    meshes = keep(rows >= meshes.sizes[STAGE_AXIS], "fewer sequences on a rank than stages")
    return with_micro_batches(meshes, torch.tensor(batch_size) // meshes.product(batch_axes))


def _strategies(meshes: Candidates, table: Table) -> Sequence[Dispatch]:
    """Return the strategies that differ: all if an axis of the meshes shards the experts."""
    mesh = Mesh.planned({axis: 2 for axis in meshes.sizes})
    *_, of_experts = activation_spec(EXPERT_TOKEN_DIMS, mesh, table.rules)
    return STRATEGIES if of_experts else ("auto",)


def _count(excluded: Counter[str], reason: str, number: int) -> None:
    if number:
        excluded[reason] += number
