"""Search for the fastest plans of a model on a number of ranks."""

import bisect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

from torch import nn

from maxmoe.adapters import planned_copy
from maxmoe.checks.fields import check_int
from maxmoe.declaration import EXPERT_TOKEN_DIMS
from maxmoe.nn import MoE, set_recompute
from maxmoe.parallel.parallelize import types_that_may_mix_tokens
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.sharded_tokens import activation_spec, token_sharding
from maxmoe.planning.device import Device
from maxmoe.planning.memory import MIXED_PRECISION, StateDtypes, activation_memory, parameter_dtype, stored_memory
from maxmoe.planning.model_parts import ModelParts
from maxmoe.planning.planned_batch import PlannedBatch, check_sequence_length
from maxmoe.planning.predict import MeshCosts, PredictedPlan, Step
from maxmoe.planning.search_result import NoPlanFits, SearchResult
from maxmoe.sharding.mesh import STAGE_AXIS, Mesh
from maxmoe.sharding.rules import LogicalRules, preset_names

# From the axis with the fewest bytes to the one with the most, so that the last ones are within a node. Other axes come
# first. `fsdp_transpose` shards the same weights as `fsdp`, along another dim, and is not tried.
ORDER = (STAGE_AXIS, "data", "fsdp", "context", "expert", "tensor")
WITHIN_NODE = ("context", "tensor")  # axes that are tried up to the number of ranks of a node
CHUNKS = (1, 2, 4)
# With balanced routing, "least_loaded" is "ragged_all_to_all".
STRATEGIES: tuple[Dispatch, ...] = ("ragged_all_to_all", "ring_of_experts", "gather_weights")
# Micro-batches in stages that are tried on all meshes, and on the fastest ones.
USUAL_MICRO_BATCHES, ALL_MICRO_BATCHES = (8,), (1, 2, 4, 8, 16, 32, 64)
REFINED = 50  # meshes on which all strategies, chunks and numbers of micro-batches are tried
# Each recomputes the parts of the one before it, so that it needs more time.
RECOMPUTE: tuple[tuple[str, ...], ...] = (
    (),
    ("experts",),
    ("attention", "experts"),
    ("attention", "experts", "feed_forward", "norms", "shared_experts"),
    ("blocks",),
)
FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # of the number of ranks, tried where no plan fits
NUM_TRIED = 40  # meshes of each of them
NEAREST = 3  # plans that are named where no plan fits


class Candidate(NamedTuple):
    """A mesh with rules."""

    rules: str
    sizes: tuple[tuple[str, int], ...]  # of the axes larger than one
    num_shards: int  # ranks over which weights may be sharded
    num_groups: int  # ranks over which experts may be sharded


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` positive integers whose product is `number`, each once."""
    if count == 0:
        yield from [()] if number == 1 else []
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            yield from ((factor, *others) for others in factorisations(number // factor, count - 1))


class Search:
    """Plans of a model on a number of ranks that have been found so far, and in `result` what excludes others."""

    def __init__(self, parts: ModelParts, rules: Sequence[str], result: SearchResult) -> None:
        self.parts, self.result, self.rule_names, self._limit = parts, result, rules, result.device.memory
        self.found: dict[tuple[Candidate, Dispatch, int], PredictedPlan] = {}
        self.smallest: list[PredictedPlan] = []
        self._rules = {name: LogicalRules.load(name) for name in rules}
        known = {name for module in parts.model.modules() for name in getattr(module, "recompute_names", ())}
        self._recompute = [*dict.fromkeys(tuple(name for name in names if name in known) for names in RECOMPUTE)]
        self._undeclared = types_that_may_mix_tokens(parts.on_one_rank)
        self._stored = sum(stored_memory(parts.on_one_rank, "adamw", (), result.step.state_dtypes).values())
        self._num_experts = [module.config.num_experts for module in parts.reduced.modules() if isinstance(module, MoE)]

    def candidates(self) -> list[Candidate]:
        """Return the meshes that divide the tokens and the experts, and count the others by the reason."""
        found: dict[Hashable, Candidate] = {}
        for name, rules in self._rules.items():
            known = dict.fromkeys(axis for _, axes in rules for axis in axes)
            axes = [axis for axis in known if axis not in (*ORDER, "fsdp_transpose")]
            axes += [axis for axis in ORDER if axis in known and (axis != STAGE_AXIS or self.parts.num_blocks)]
            within = Mesh.planned({axis: 2 for axis in axes if axis != STAGE_AXIS})
            batch_axes, length_axes = token_sharding(within, rules).spec
            *_, expert_axes = activation_spec(EXPERT_TOKEN_DIMS, within, rules)
            of_weights = {axis for of, axes in rules if not of.startswith("activation") for axis in axes}
            for factors in factorisations(self.result.world_size, len(axes)):
                mesh = Mesh.planned({axis: size for axis, size in zip(axes, factors, strict=True) if size > 1})
                parts = [mesh.size(*axes) for axes in (batch_axes, length_axes, expert_axes)]
                if (reason := self._why_not(mesh, *parts)) is not None:
                    self.result.cannot_run[reason] += 1
                    continue
                # Rules that differ in absent axes only give the same plan.
                effective = dict.fromkeys((of, tuple(filter(mesh.sizes.__contains__, axes))) for of, axes in rules)
                same = frozenset(mesh.sizes.items()), tuple(sorted(effective, key=itemgetter(0)))
                shards = mesh.size(*{*of_weights, STAGE_AXIS})
                found.setdefault(same, Candidate(name, tuple(mesh.sizes.items()), shards, parts[2]))
        return [*found.values()]

    def _why_not(self, mesh: Mesh, batch_parts: int, length_parts: int, expert_parts: int) -> str | None:
        """Return why a mesh is not tried, or None."""
        batch_size, length, *_ = self.result.step
        stages, per_node = mesh.size(STAGE_AXIS), self.result.device.ranks_per_node
        if stages > max(1, self.parts.num_blocks):
            return "more stages than blocks"
        if batch_size % batch_parts:
            return f"batch_size ({batch_size}) is not divisible"
        if length % length_parts:
            return f"sequence_length ({length}) is not divisible"
        if length_parts > 1 and self._undeclared:
            return (
                f"sequences are sharded, and {', '.join(self._undeclared)} declare nothing: a module that mixes tokens "
                "would compute something else (needs_whole_sequences of maxmoe.parallel.Declaration)"
            )
        if batch_size // batch_parts < stages:
            return "fewer sequences on a rank than stages"
        if any(number % expert_parts for number in self._num_experts):
            return f"the number of experts ({min(self._num_experts)}) is not divisible"
        if per_node and any(mesh.size(axis) > per_node for axis in WITHIN_NODE):
            return f"{' or '.join(WITHIN_NODE)} above the ranks of a node ({per_node})"
        return None

    def run(self, progress: Callable[[list[Any]], Iterable[Any]]) -> None:
        """Try every mesh with the strategy "auto", then more choices on the fastest ones; Ctrl-C ends the search.

        `progress` yields the items of a list with a progress bar.
        """
        result, candidates = self.result, self.candidates()
        result.num_considered = result.num_left = len(candidates)
        fastest: list[tuple[float, int]] = []
        with suppress(KeyboardInterrupt):
            for number, candidate in enumerate(progress(candidates)):
                bound = fastest[-1][0] if len(fastest) == REFINED else math.inf
                seconds = self._try(candidate, "auto", bound, is_first=True)
                if seconds < bound:
                    bisect.insort(fastest, (seconds, number))
                    del fastest[REFINED:]
                result.num_left -= 1
            best = [candidates[number] for _, number in fastest]
            choices = [(each, name) for each in best for name in (STRATEGIES if each.num_groups > 1 else ("auto",))]
            for candidate, dispatch in progress(choices):
                bound = sorted(plan.seconds for plan in self.found.values())[:REFINED][-1]
                self._try(candidate, dispatch, bound, is_first=False)
            result.is_refined = True

    def any_fits(self) -> bool:
        """Return whether one of the plans that shard most fits in memory."""
        candidates = sorted(self.candidates(), key=lambda candidate: -candidate.num_shards)[:NUM_TRIED]
        return any(self._try(each, "auto", math.inf, is_first=True) < math.inf for each in candidates)

    def _try(self, candidate: Candidate, dispatch: Dispatch, bound: float, *, is_first: bool) -> float:
        """Keep the plans of a mesh that fit and take less time than `bound`, and return the least time, or infinity.

        The first time, only the usual micro-batches without chunks are tried, and meshes without a plan are counted.
        """
        result, limit = self.result, self._limit
        is_known = len(self.smallest) == NEAREST  # further plans that do not fit need not be planned
        if is_known and self._stored > limit * candidate.num_shards:
            result.num_over_memory += is_first
            return math.inf
        mesh, rules = Mesh.planned(dict(candidate.sizes)), self._rules[candidate.rules]
        try:
            costs = MeshCosts(self.parts, result.step, result.device, mesh, rules, dispatch)
        except ValueError as error:
            result.refused += [f"{mesh}, {candidate.rules}: {error}"] * is_first
            return math.inf
        if is_known and costs.least_memory > limit:
            result.num_over_memory += is_first
            return math.inf
        if dispatch == "auto" and candidate.num_groups > 1:
            dispatch = next((plan.strategy for _, plan in costs.plan.layers.values()), dispatch)
        stages, plans = mesh.size(STAGE_AXIS), list[PredictedPlan]()
        micro_batches, chunks = (USUAL_MICRO_BATCHES, CHUNKS[:1]) if is_first else (ALL_MICRO_BATCHES, CHUNKS)
        numbers = {min(times, costs.rows // stages) * stages for times in micro_batches} if stages > 1 else {1}
        for many in sorted(numbers):
            set_recompute(self.parts.reduced, ())
            if min(costs.cost(many, number).seconds for number in chunks) < bound:
                plans.append(self._fastest(costs, candidate.rules, dispatch, many, chunks))
        fitting = [plan for plan in plans if plan.memory <= limit]
        for plan in fitting:
            key = candidate, dispatch, plan.num_micro_batches
            self.found[key] = min(self.found.get(key, plan), plan, key=lambda plan: plan.seconds)
        if plans and not fitting:
            result.num_over_memory += is_first
            self.smallest = sorted([*self.smallest, *plans], key=lambda plan: plan.memory)[:NEAREST]
        return min((plan.seconds for plan in fitting), default=math.inf)

    def _fastest(
        self, costs: MeshCosts, rules: str, dispatch: Dispatch, many: int, chunks: Sequence[int]
    ) -> PredictedPlan:
        """Return the plan with the least recomputation that fits, or else with the most."""

        def memory(names: tuple[str, ...]) -> int:
            set_recompute(self.parts.reduced, names)
            return sum(costs.memory(many, chunks[0]).values())

        number = bisect.bisect_left(self._recompute, True, key=lambda names: memory(names) <= self._limit)
        names = self._recompute[min(number, len(self._recompute) - 1)]
        set_recompute(self.parts.reduced, names)
        plans = [costs.predicted(rules, dispatch, names, many, each) for each in chunks]
        return min(plans, key=lambda plan: (plan.memory > self._limit, plan.seconds))


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

    Every mesh of `world_size` ranks over the axes of the rules that divides the tokens and the experts is planned by
    the planner of `maxmoe.parallelize` and timed as by `predict`, with the least recomputation that fits. Pipeline
    stages have the schedule 1F1B with 8 micro-batches for each stage. On the fastest 50 meshes, other numbers of
    micro-batches, chunks of tokens, and strategies other than "auto" for experts on other ranks are tried as well.
    Ctrl-C ends the search with what has been found. The optimizer is AdamW.

    Args:
        module: module before `maxmoe.parallelize`, on any device, including meta, with parameters of one dtype. Only a
            module that declares `pipeline_parts` is cut into stages.
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
            module declares (`max_sequence_length`), a module whose saved tensors are not known, an unknown device or
            rules, and a device without a peak in the dtype of the parameters.
    """
    numbers = {"world_size": world_size, "batch_size": batch_size, "num_plans": num_plans}
    for name, value in (numbers | {"sequence_length": sequence_length}).items():
        check_int(name, value, at_least=1)
    check_sequence_length(module, sequence_length)
    device = Device.load(device)
    device = device if memory is None else replace(device, memory=memory)
    parts = ModelParts(planned_copy(module))
    batch = PlannedBatch(parts.on_one_rank, batch_size, sequence_length, parameter_dtype(parts.on_one_rank))
    step = Step(batch_size, sequence_length, batch.dtype, state_dtypes)
    activation_memory(batch)  # raises what every mesh would raise
    device.peak(step.dtype)
    uncounted = batch.trace().problem
    result = SearchResult(world_size=world_size, device=device, step=step, uncounted=uncounted)
    presets = sorted(preset_names(), key=lambda name: (name != "default", name))
    run = Search(parts, presets if rules is None else rules, result)
    run.run(_with_bar if progress else iter)
    if not result.num_considered:
        reasons = ", ".join(f"{number} meshes: {reason}" for reason, number in result.cannot_run.items())
        raise ValueError(f"no mesh of {world_size} ranks can run the batch: {reasons or 'the rules have no axes'}")
    if not run.found and result.num_left:
        raise KeyboardInterrupt
    if not run.found and not run.smallest:
        raise ValueError(
            f"no plan of {world_size} ranks can be made: {len(result.refused)} meshes are refused, the first one: "
            f"{result.refused[0]}"
        )
    if not run.found:
        raise NoPlanFits(run.smallest, device.memory, remedies(run))
    found: dict[str, PredictedPlan] = {}
    for plan in run.found.values():  # in the order of the rules, of which several may give the same plan
        found.setdefault(repr(replace(plan, rules="")), plan)
    result.plans = tuple(sorted(found.values(), key=lambda plan: plan.seconds)[:num_plans])
    return result


def remedies(run: Search) -> Iterator[str]:
    """Say what would make a plan fit: dtypes of the state, or more ranks."""
    step, world_size = run.result.step, run.result.world_size
    dtypes, name = step.state_dtypes, str(step.dtype).removeprefix("torch.")
    stored, others = dtypes.of_parameters(step.dtype), dict[str, StateDtypes]()
    if stored["moments"] != step.dtype:
        others[f"moments in {name}"] = replace(dtypes, moments=step.dtype)
    if "master weights" in stored:
        others["no master weights"] = replace(dtypes, master=step.dtype)
    if len(others) > 1:
        others[" and ".join(others)] = replace(dtypes, moments=step.dtype, master=step.dtype)

    def fits(state_dtypes: StateDtypes, num_ranks: int) -> bool:
        changed = replace(run.result, step=step._replace(state_dtypes=state_dtypes), world_size=num_ranks)
        return Search(run.parts, run.rule_names, changed).any_fits()

    of_dtypes = (text for text, other in others.items() if fits(other, world_size))
    if (text := next(of_dtypes, None)) is not None:
        yield f"It fits with {text}."
    of_ranks = (factor * world_size for factor in FACTORS if fits(dtypes, factor * world_size))
    number = next(of_ranks, None)
    least = f"No plan was found that fits on up to {FACTORS[-1] * world_size} ranks with this batch."
    yield least if number is None else f"It fits on {number} ranks."


def _with_bar(items: list[Any]) -> Iterable[Any]:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return items
    return tqdm(items, desc="planning", unit=" meshes", dynamic_ncols=True)  # type: ignore[no-any-return]
