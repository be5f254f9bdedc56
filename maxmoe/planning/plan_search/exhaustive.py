"""Tries all plans, except those that a bound shows to be slower or larger than the best ones so far."""

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from maxmoe.nn import recompute_of, set_recompute
from maxmoe.planning.plan_search.candidates import Candidates
from maxmoe.planning.plan_search.evaluation import Evaluation, Planned, for_all
from maxmoe.planning.plan_search.found_plan import FoundPlan
from maxmoe.planning.plan_search.groups import Group, groups
from maxmoe.planning.plan_search.rule_tables import Table
from maxmoe.planning.plan_search.settings import CHUNKS, recomputations
from maxmoe.planning.plan_search.step_cost import StepCost
from maxmoe.sharding.rules import LogicalRules


class Best:
    """The plans with the smallest costs so far.

    Args:
        size: number of plans to keep.
        cost: cost of a plan.
    """

    def __init__(self, size: int, cost: Callable[[FoundPlan], float]) -> None:
        self.plans: list[FoundPlan] = []
        self._size, self._cost = size, cost

    @property
    def bound(self) -> float:
        """Cost that a plan must be below to be kept."""
        return self._cost(self.plans[-1]) if len(self.plans) == self._size else torch.inf

    def add(self, plans: Iterable[FoundPlan]) -> None:
        """Keep the best of the plans so far and of some more; of equal ones, the earlier."""
        for plan in plans:
            if self._cost(plan) < self.bound:
                bisect.insort_right(self.plans, plan, key=self._cost)
                del self.plans[self._size :]


class Exhaustive:
    """A search, and what it has found so far.

    Args:
        evaluation: model, device and step.
        world_size: number of ranks.
        limit: bytes of a rank.
        tables: rules to try.
        num_plans: number of plans to keep.
    """

    def __init__(
        self, evaluation: Evaluation, world_size: int, limit: int, tables: Sequence[Table], num_plans: int
    ) -> None:
        self.evaluation, self.limit, self.world_size = evaluation, limit, world_size
        self.excluded: Counter[str] = Counter()
        self.fastest = Best(num_plans, lambda plan: plan.seconds)
        self.smallest = Best(3, lambda plan: plan.memory)
        self._options = recomputations(evaluation.parts.whole)
        # Few axes first: their plans are often the best ones, and a low bound excludes others early.
        self._groups = sorted(
            groups(evaluation, world_size, tables, self.excluded), key=lambda group: len(group.meshes.sizes)
        )
        self.num_plans = sum(len(group.meshes) for group in self._groups)

    def search(self) -> None:
        """Find the fastest plans that fit in memory."""
        with_recompute = recompute_of(self.evaluation.parts.whole)
        try:
            set_recompute(self.evaluation.parts.whole, ())
            self._least_seconds = self._seconds_of_products()
            for group in self._groups:
                self._try(group, self._fitting, self.fastest)
        finally:
            set_recompute(self.evaluation.parts.whole, with_recompute)

    def search_smallest(self) -> None:
        """Find the plans that need least memory."""
        with_recompute = recompute_of(self.evaluation.parts.whole)
        try:
            for group in self._groups:
                self._try(group, self._least_memory, self.smallest)
        finally:
            set_recompute(self.evaluation.parts.whole, with_recompute)

    def _seconds_of_products(self) -> float:
        """Return the time of all products if they are divided evenly among all ranks."""
        one = Candidates({}, torch.ones(1, dtype=torch.int64))
        cost = self.evaluation.plan(one, LogicalRules(), "auto").cost(1)
        device = self.evaluation.device
        peak = device.peak(self.evaluation.step.dtype) * device.max_share
        return float(cost.flops[0]) / self.world_size / peak * device.slowdown(self.world_size)

    def _try(self, group: Group, find: "Callable[[Candidates, Group], Found]", best: Best) -> None:
        for meshes, result in for_all(lambda meshes: find(meshes, group), group.meshes):
            if isinstance(result, ValueError):
                self.excluded[_reason(result)] += len(meshes)
            else:
                plans, excluded = result
                best.add(plans)
                self.excluded.update(excluded)

    def _fitting(self, meshes: Candidates, group: Group) -> "Found":
        """Find the plans that fit, each with the chunks and the recomputation that take least time."""
        planned = self.evaluation.plan(meshes, group.table.rules, group.dispatch)
        memory, exposed = planned.bounds()
        too_large = memory > self.limit
        rest = ~too_large & (exposed + self._least_seconds < self.fastest.bound)
        found: dict[int, FoundPlan] = {}
        for names in self._options:
            if not rest.any():
                break
            set_recompute(self.evaluation.parts.whole, names)
            fit = rest.clone()
            for num_chunks, cost in self._costs(planned, group, rest):
                fits = rest & (cost.memory <= self.limit)
                fit &= fits
                for index in (fits & (cost.seconds < self.fastest.bound)).nonzero()[:, 0].tolist():
                    plan = FoundPlan.of(cost, index, **_settings(meshes, index, group, num_chunks, names))
                    found[index] = min(found.get(index, plan), plan, key=lambda plan: plan.seconds)
            rest &= ~fit
        # What fits with one number of chunks stays in `rest` until all of them fit.
        number = int((too_large | rest).sum()) - sum(bool(rest[index]) for index in found)
        return list(found.values()), Counter({"over memory": number})

    def _costs(self, planned: Planned, group: Group, rest: Tensor) -> Iterator[tuple[int, StepCost]]:
        """Yield the costs with one chunk, and with more chunks if these can be among the fastest."""
        cost = planned.cost(1)
        yield 1, cost
        is_close = rest & (cost.seconds - cost.dispatched < self.fastest.bound)
        if group.dispatch in ("ragged_all_to_all", "ring_of_experts") and is_close.any():
            for num_chunks in CHUNKS[1:]:
                yield num_chunks, planned.cost(num_chunks)

    def _least_memory(self, meshes: Candidates, group: Group) -> "Found":
        """Find the plans that need less memory than the smallest ones so far."""
        planned = self.evaluation.plan(meshes, group.table.rules, group.dispatch)
        memory, _ = planned.bounds()
        names = self._options[-1]
        plans = []
        if bool((memory < self.smallest.bound).any()):
            set_recompute(self.evaluation.parts.whole, names)
            cost = planned.cost(1)
            for index in cost.memory.argsort()[:3].tolist():
                plans.append(FoundPlan.of(cost, index, **_settings(meshes, index, group, 1, names)))
        return plans, Counter()


Found = tuple[list[FoundPlan], Counter[str]]


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
    return " ".join(text.partition(";")[0].split())[:100]
