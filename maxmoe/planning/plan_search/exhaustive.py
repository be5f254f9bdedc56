"""Tries all plans, except those that a bound shows to be slower or larger than the best ones so far."""

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe.nn import recompute_of, set_recompute
from maxmoe.parallel.apply.sharded_tokens import token_sharding
from maxmoe.planning.plan_search.candidates import Candidates, num_choices, with_micro_batches, with_same_axes
from maxmoe.planning.plan_search.evaluation import Evaluation, PlannedMeshes, for_all
from maxmoe.planning.plan_search.groups import Group, groups
from maxmoe.planning.plan_search.predicted_plan import PredictedPlan
from maxmoe.planning.plan_search.rule_tables import NamedRules
from maxmoe.planning.plan_search.settings import CHUNKS, recomputations
from maxmoe.planning.plan_search.step_cost import StepCost

FIRST_BATCH = 64  # meshes that are evaluated before the bound is read again; then 16 times as many


class BestPlans:
    """The plans with the smallest costs so far.

    Args:
        size: number of plans to keep.
        cost: cost of a plan.
    """

    def __init__(self, size: int, cost: Callable[[PredictedPlan], float]) -> None:
        self.plans: list[PredictedPlan] = []
        self._size, self._cost = size, cost

    @property
    def bound(self) -> float:
        """Cost that a plan must be below to be kept."""
        return self._cost(self.plans[-1]) if len(self.plans) == self._size else torch.inf

    def add(self, plans: Iterable[PredictedPlan]) -> None:
        """Keep the best of the plans so far and of some more; of equal ones, the earlier."""
        for plan in plans:
            # Other rules may give the same plan.
            is_new = not any(plan.is_same(other) for other in self.plans)
            if self._cost(plan) < self.bound and is_new:
                bisect.insort_right(self.plans, plan, key=self._cost)
                del self.plans[self._size :]


class ExhaustiveSearch:
    """A search, and what it has found so far.

    Args:
        evaluation: model, device and step.
        world_size: number of ranks.
        limit: bytes of a rank.
        tables: rules to try.
        num_plans: number of plans to keep.
    """

    def __init__(
        self, evaluation: Evaluation, world_size: int, limit: int, tables: Sequence[NamedRules], num_plans: int
    ) -> None:
        self.evaluation, self.limit, self.world_size = evaluation, limit, world_size
        self.cannot_run: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.num_over_memory = 0
        self.fastest = BestPlans(num_plans, lambda plan: plan.seconds)
        self.smallest = BestPlans(3, lambda plan: plan.memory)
        self._options = recomputations(evaluation.parts.whole)
        self._groups = list(groups(evaluation, world_size, tables, self.cannot_run))
        self.num_plans = sum(int(self._num_choices(group).sum()) for group in self._groups)

    def search(self) -> None:
        """Find the fastest plans that fit in memory."""
        with self._recomputation():
            for each in self._bounded:
                self.num_over_memory += int(self._num_choices(each.group)[each.memory > self.limit].sum())
            self._in_order(
                [each.group for each in self._bounded],
                [torch.where(each.memory > self.limit, torch.inf, each.seconds) for each in self._bounded],
                self._fitting,
                self.fastest,
            )

    def search_smallest(self) -> None:
        """Find the plans that need least memory."""
        with self._recomputation():
            self._in_order(
                [each.group for each in self._bounded],
                [each.memory for each in self._bounded],
                self._least_memory,
                self.smallest,
            )

    @cached_property
    def _bounded(self) -> list["BoundedGroup"]:
        """All meshes with lower bounds of their memory and time; those that cannot be planned are counted."""
        bounded = []
        for group in self._groups:

            def bounds(meshes: Candidates, group: Group = group) -> tuple[Tensor, Tensor]:
                return self.evaluation.plan(meshes, group.table.rules, group.dispatch).bounds()

            for meshes, result in for_all(bounds, group.meshes):
                if isinstance(result, ValueError):
                    self.refused[_reason(result)] += int(self._num_choices(group._replace(meshes=meshes)).sum())
                else:
                    bounded.append(BoundedGroup(group._replace(meshes=meshes), *result))
        return bounded

    def _in_order(self, groups: Sequence[Group], bounds: Sequence[Tensor], find: "Find", best: BestPlans) -> None:
        """Evaluate meshes in the order of their bounds, until no bound is below the costs of the best plans."""
        flat = torch.cat(list(bounds)) if bounds else torch.empty(0)
        owner = torch.cat([torch.full((len(each),), number) for number, each in enumerate(bounds)] or [flat])
        place = torch.cat([torch.arange(len(each)) for each in bounds] or [flat])
        order, begin, size = flat.argsort(stable=True), 0, FIRST_BATCH
        while begin < len(order) and float(flat[order[begin]]) < best.bound:
            batch = order[begin : begin + size]
            batch = batch[flat[batch] < best.bound]
            begin, size = begin + size, size * 16
            for number in torch.unique(owner[batch]).tolist():
                index = place[batch[owner[batch] == number]]
                for meshes in with_same_axes(groups[number].meshes, index):
                    self._try(groups[number]._replace(meshes=meshes), find, best)

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        """Restore what the model recomputes, which the search changes."""
        model = self.evaluation.parts.whole
        before = recompute_of(model)
        try:
            set_recompute(model, ())
            yield
        finally:
            set_recompute(model, before)

    def _try(self, group: Group, find: "Find", best: BestPlans) -> None:
        meshes = with_micro_batches(group.meshes, self._rows(group)) if group.meshes.has_stages else group.meshes
        for part, result in for_all(lambda part: find(part, group), meshes):
            if isinstance(result, ValueError):
                self.refused[_reason(result)] += len(part)
            else:
                best.add(result)

    def _rows(self, group: Group) -> Tensor:
        """Return the number of sequences of a rank in each mesh."""
        batch_size, *_ = self.evaluation.step
        batch_axes, _ = token_sharding(group.meshes.mesh.within_stage(), group.table.rules).spec
        return batch_size // group.meshes.product(batch_axes)

    def _num_choices(self, group: Group) -> Tensor:
        """Return the number of plans of each mesh: one for each number of micro-batches."""
        return num_choices(group.meshes, self._rows(group))

    def _fitting(self, meshes: Candidates, group: Group) -> list[PredictedPlan]:
        """Find the plans that fit, each with the first recomputation that fits and the best number of chunks."""
        planned = self.evaluation.plan(meshes, group.table.rules, group.dispatch)
        rest = torch.ones(len(meshes), dtype=torch.bool)
        found: list[PredictedPlan] = []
        for names in self._options:
            if not rest.any():
                break
            set_recompute(self.evaluation.parts.whole, names)
            memory = planned.memory()
            fits = rest & (memory <= self.limit)
            rest &= ~fits
            if not fits.any():
                continue
            best: dict[int, PredictedPlan] = {}
            for num_chunks, cost in self._costs(planned, group, fits):
                for index in (fits & (cost.seconds < self.fastest.bound)).nonzero()[:, 0].tolist():
                    plan = PredictedPlan.of(cost, memory, index, **_settings(meshes, index, group, num_chunks, names))
                    best[index] = min(best.get(index, plan), plan, key=lambda plan: plan.seconds)
            found += best.values()
        set_recompute(self.evaluation.parts.whole, ())
        self.num_over_memory += int(rest.sum())
        return found

    def _costs(self, planned: PlannedMeshes, group: Group, fits: Tensor) -> Iterator[tuple[int, StepCost]]:
        """Yield the costs with one chunk, and with more chunks if these can be among the fastest."""
        cost = planned.cost(1)
        yield 1, cost
        is_close = fits & (cost.seconds - cost.dispatched < self.fastest.bound)
        if group.dispatch in ("ragged_all_to_all", "ring_of_experts") and is_close.any():
            for num_chunks in CHUNKS[1:]:
                yield num_chunks, planned.cost(num_chunks)

    def _least_memory(self, meshes: Candidates, group: Group) -> list[PredictedPlan]:
        """Find the plans that need least memory."""
        planned = self.evaluation.plan(meshes, group.table.rules, group.dispatch)
        names = self._options[-1]
        set_recompute(self.evaluation.parts.whole, names)
        memory, cost = planned.memory(), planned.cost(1)
        set_recompute(self.evaluation.parts.whole, ())
        chosen = memory.argsort()[:3].tolist()
        return [PredictedPlan.of(cost, memory, index, **_settings(meshes, index, group, 1, names)) for index in chosen]


class BoundedGroup(NamedTuple):
    """Meshes with lower bounds of their costs, both ``(N,)``: bytes, and seconds of a step."""

    group: Group
    memory: Tensor
    seconds: Tensor


Find = Callable[[Candidates, Group], list[PredictedPlan]]


def _settings(
    meshes: Candidates, index: int, group: Group, num_chunks: int, recompute: tuple[str, ...]
) -> dict[str, object]:
    return {
        "rules": group.table.name,
        "mesh": meshes.mesh_sizes(index),
        "dispatch": group.dispatch,
        "num_chunks": num_chunks,
        "recompute": recompute,
        "num_micro_batches": int(meshes.num_micro_batches[index]),
    }


def _reason(error: ValueError) -> str:
    """Return the message of an error of the planner without what differs from mesh to mesh."""
    text = re.sub(r"\([^()]*\)|\d+", "", str(error).splitlines()[0].partition(":")[2] or str(error))
    rule = re.split("[:;]", text.strip())[0]  # then come the sizes of one mesh
    return " ".join(rule.split())[:100]
