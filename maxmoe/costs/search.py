"""Search for the fastest plans of a model on a number of ranks, of which few steps are measured."""

import bisect
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.checks.fields import check_int
from maxmoe.costs.candidates import Candidate, Candidates, Step
from maxmoe.costs.device import Device
from maxmoe.costs.estimate import check_sequence_length, estimate
from maxmoe.costs.search_result import FoundPlan, NoPlanFits, SearchResult
from maxmoe.costs.step_time import computing, step_time
from maxmoe.costs.stored import MIXED_PRECISION, StateDtypes
from maxmoe.nn import set_recompute
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.rules import LogicalRules, preset_names

MOST_MEASURED = 14  # steps
NEAREST = 3  # plans that are named where no plan fits
FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # of the number of ranks, tried where no plan fits
# Each recomputes the parts of the one before it, so that it needs more time.
RECOMPUTE: tuple[tuple[str, ...], ...] = (
    (),
    ("experts",),
    ("attention", "experts", "feed_forward", "norms", "shared_experts"),
    ("blocks",),
)


def recompute_choices(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the parts of a model that a plan recomputes: none, then more and more."""
    known = {name for module in model.modules() for name in getattr(module, "recompute_names", ())}
    return [*dict.fromkeys(tuple(name for name in names if name in known) for names in RECOMPUTE)]


class Search:
    """Plans that have been measured so far: those that fit in memory are `found`, others are `too_large`."""

    def __init__(self, model: nn.Module, world_size: int, step: Step, rules: Sequence[str]) -> None:
        self.model, self.step, self.world_size = model, step, world_size
        self.found: list[FoundPlan] = []
        self.too_large: list[FoundPlan] = []
        self._recompute = recompute_choices(model)
        self.peak = step.device.peak(next(each.dtype for each in model.parameters() if each.is_floating_point()))
        set_recompute(model, ())
        one_rank = Mesh.planned({})
        options: dict[str, Any] = {"batch_size": 1, "sequence_length": step.sequence_length, "allow_unused": True}
        (alone,) = estimate(model, one_rank, LogicalRules(), **options).ranks
        self.flops = alone.flops * step.batch_size
        compute = computing(alone.work, self.peak, one_rank, step.device) * step.batch_size
        self.candidates = Candidates(model, rules, step, compute)
        self.left, self.others, self.refused = self.candidates.of(world_size)
        self.num_considered = len(self.left)
        self.left = [each for each in self.left if each.stored <= step.device.memory] or self._smallest(self.left)
        self.num_over_memory = self.num_considered - len(self.left)
        self._exact: set[Candidate] = set()  # those whose own plan has been made
        self._next: dict[Candidate, int] = {}  # the least recomputation that has not been tried
        # Least bytes beside stored ones that a token has needed with each recomputation.
        self._per_token = dict.fromkeys(range(len(self._recompute)), 0.0)

    def _smallest(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda each: each.stored)[:NEAREST]

    def _least(self, candidate: Candidate) -> int | None:
        """Return the least recomputation with which a candidate may fit, by what has been measured for others."""
        for index in range(self._next.get(candidate, 0), len(self._recompute)):
            if candidate.stored + self._per_token[index] * candidate.tokens <= self.step.device.memory:
                return index
        return None

    def _choose(self) -> tuple[Candidate, int] | None:
        """Return what is measured next: the fastest candidate that may fit, else the one that needs least memory."""
        while (candidate := next((each for each in self.left if self._least(each) is not None), None)) is not None:
            if candidate in self._exact:
                return candidate, self._least(candidate) or 0
            self.left.remove(candidate)
            exact = self.candidates.exact(candidate)
            self._exact.add(exact)
            bisect.insort(self.left, exact, key=lambda each: each.seconds)
        last = len(self._recompute) - 1
        untried = [each for each in self.left if self._next.get(each, 0) <= last]
        if self.found or len(self.too_large) >= NEAREST + last or not untried:
            return None
        return min(untried, key=lambda each: each.stored + self._per_token[last] * each.tokens), last

    def run(self, progress: Callable[[Iterable[int]], Iterable[int]]) -> bool:
        """Measure candidates until there are enough; return False if Ctrl-C has ended the search."""
        with suppress(KeyboardInterrupt):
            for _ in progress(range(MOST_MEASURED)):
                if (chosen := self._choose()) is None:
                    break
                self.measure(*chosen)
            return True
        return False

    def measure(self, candidate: Candidate, index: int) -> None:
        """Measure a step of a candidate with some recomputation."""
        mesh, step, count = Mesh.planned(dict(candidate.sizes)), self.step, candidate.num_micro_batches
        set_recompute(self.model, self._recompute[index])
        self._next[candidate] = index + 1
        try:
            costs = estimate(
                self.model,
                mesh,
                candidate.rules,
                dispatch=candidate.dispatch,
                allow_unused=True,
                batch_size=step.batch_size,
                sequence_length=step.sequence_length,
                num_micro_batches=count if mesh.size(STAGE_AXIS) > 1 else None,
                state_dtypes=step.state_dtypes,
            )
        except ValueError as error:
            self.refused.append(f"{mesh}, {candidate.rules}, {candidate.dispatch}: {error}")
            self.left.remove(candidate)
            return
        time = step_time(costs.ranks, count, self.peak, mesh, step.device)
        plan = FoundPlan(
            rules=candidate.rules,
            mesh=mesh.sizes,
            dispatch=candidate.dispatch,
            recompute=self._recompute[index],
            num_micro_batches=count,
            memory_parts=dict(costs.memory),
            time=time,
            flops=costs.flops,
            tokens_per_second=step.batch_size * step.sequence_length / time.seconds / self.world_size,
            mfu=self.flops / self.world_size / time.seconds / self.peak,
        )
        per_token = max(0.0, (plan.memory - candidate.stored) / candidate.tokens)
        self._per_token[index] = min(self._per_token[index] or per_token, per_token)
        fits = plan.memory <= step.device.memory
        (self.found if fits else self.too_large).append(plan)
        if fits:
            self.left.remove(candidate)

    def number_that_fits(self) -> int | None:
        """Return the least multiple of the number of ranks on which the plan with least memory fits, measured."""
        last = len(self._recompute) - 1
        for factor in FACTORS:
            number = factor * self.world_size
            candidates, *_ = self.candidates.of(number)
            for each in sorted(candidates, key=lambda each: each.stored + self._per_token[last] * each.tokens)[:1]:
                if each.stored + self._per_token[last] * each.tokens <= self.step.device.memory:
                    self.left, num_found = [each], len(self.found)
                    self.measure(each, last)
                    if len(self.found) > num_found:
                        return number
        return None


def search(
    module: nn.Module,
    world_size: int,
    device: Device | str,
    *,
    batch_size: int,
    sequence_length: int,
    memory: int | None = None,
    rules: Sequence[str] | None = None,
    state_dtypes: StateDtypes = MIXED_PRECISION,
    num_plans: int = 10,
    progress: bool = False,
) -> SearchResult:
    """Search for the plans of a training step that take least time and fit in memory.

    The meshes of `world_size` ranks over the axes of the rules that divide the tokens and the experts are put in the
    order of a least time, by arithmetic on their plans; those whose parameters, gradients and optimizer state need more
    memory than a rank has are left out. Of the first ones, at most 14 steps are measured as by `estimate`, with the
    least recomputation that fits. Pipeline stages have the schedule 1F1B with 8 micro-batches for each stage. Ctrl-C
    ends the search with what has been found. The optimizer is AdamW.

    Args:
        module: module before `maxmoe.parallelize`, on any device, including meta. Only a module that declares
            `pipeline_parts` is cut into stages.
        world_size: number of ranks.
        device: device and network: a `Device`, the name of one, or a YAML file.
        batch_size: number of sequences per step, over all ranks.
        sequence_length: number of tokens per sequence.
        memory: bytes of a rank; None for the memory of the device.
        rules: names of presets or YAML files of rules; None for all presets, "default" first. A plan that several of
            them give has the name of the first one.
        state_dtypes: dtypes of gradients, master weights and moments.
        num_plans: largest number of plans to return.
        progress: whether to show a progress bar, if tqdm is installed.

    Returns:
        The fastest plans in order, and what excludes the others.

    Raises:
        NoPlanFits: if no plan fits in memory, with those that need least.
        ValueError: if no mesh divides the batch, or `parallelize` refuses all plans; for longer sequences than the
            module declares (`max_sequence_length`), a module that cannot be measured, an unknown device or rules, and a
            device without a peak in the dtype of the parameters.
    """
    numbers = {"world_size": world_size, "batch_size": batch_size, "num_plans": num_plans}
    for name, value in (numbers | {"sequence_length": sequence_length}).items():
        check_int(name, value, at_least=1)
    check_sequence_length(module, sequence_length)
    device = Device.load(device)
    device = device if memory is None else replace(device, memory=memory)
    step = Step(batch_size, sequence_length, device, state_dtypes)
    presets = sorted(preset_names(), key=lambda name: (name != "default", name))
    run = Search(planned_copy(module), world_size, step, presets if rules is None else rules)
    if not run.num_considered:
        reasons = ", ".join(f"{number} meshes: {reason}" for reason, number in run.others.items())
        reasons += "".join(f", refused: {text}" for text in run.refused[:1])
        raise ValueError(f"no mesh of {world_size} ranks can run the batch: {reasons or 'the rules have no axes'}")
    is_complete = run.run(_with_bar if progress else iter)
    if not run.found and not is_complete:
        raise KeyboardInterrupt
    if not run.found and not run.too_large:
        raise ValueError(
            f"no plan of {world_size} ranks can be made: {len(run.refused)} are refused, the first one: "
            f"{run.refused[0]}"
        )
    if not run.found:
        smallest = sorted(run.too_large, key=lambda plan: plan.memory)
        distinct = {(plan.rules, *plan.mesh.items(), plan.dispatch): plan for plan in reversed(smallest)}
        raise NoPlanFits([*reversed(distinct.values())][:NEAREST], device.memory, run.number_that_fits())
    return SearchResult(
        world_size=world_size,
        device=device,
        plans=tuple(sorted(run.found, key=lambda plan: plan.seconds)[:num_plans]),
        num_considered=run.num_considered,
        num_over_memory=run.num_over_memory,
        num_measured=len(run.found) + len(run.too_large),
        cannot_run=run.others,
        refused=run.refused,
        is_complete=is_complete,
    )


def _with_bar(items: Iterable[Any]) -> Iterable[Any]:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return items
    return tqdm(items, desc="measuring", unit=" steps", dynamic_ncols=True)  # type: ignore[no-any-return]
