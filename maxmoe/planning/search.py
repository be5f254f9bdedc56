"""Search for the fastest plans of a model on a number of ranks."""

import bisect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.parallel.plan.sharded_tokens import activation_spec, token_sharding
from maxmoe.planning.device import Device
from maxmoe.planning.memory import PARAMETER_DTYPES, StateDtypes, activation_memory, parameter_dtype, stored_memory
from maxmoe.planning.model_parts import ModelParts
from maxmoe.planning.planned_batch import PlannedBatch
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
    """A mesh with rules.

    Attributes:
        rules: name of the rules.
        sizes: axes larger than one, with their sizes.
        num_shards: number of ranks over which weights may be sharded.
        num_groups: number of ranks over which experts may be sharded.
    """

    rules: str
    sizes: tuple[tuple[str, int], ...]
    num_shards: int
    num_groups: int


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` positive integers whose product is `number`, each once."""
    if count == 0:
        yield from [()] if number == 1 else []
        return
    for factor in range(1, number + 1):
        if number % factor == 0:
            yield from ((factor, *others) for others in factorisations(number // factor, count - 1))


class Search:
    """Plans of a model on a number of ranks, and what has been found so far.

    Args:
        parts: parts of the model.
        step: tokens and dtypes.
        device: device and network.
        limit: bytes of a rank.
        rules: names of presets or files.
    """

    def __init__(self, parts: ModelParts, step: Step, device: Device, limit: int, rules: Sequence[str]) -> None:
        self.parts, self.step, self.device, self.limit = parts, step, device, limit
        self.rules = {name: LogicalRules.load(name) for name in rules}
        self.found: dict[tuple[Candidate, Dispatch, int], PredictedPlan] = {}
        self.smallest: list[PredictedPlan] = []
        self.excluded: Counter[str] = Counter()
        self.num_tried = self.num_over_memory = 0
        self.is_refined = False
        self.refused: list[str] = []
        known = {name for module in parts.model.modules() for name in getattr(module, "recompute_names", ())}
        self._recompute = [*dict.fromkeys(tuple(name for name in names if name in known) for names in RECOMPUTE)]
        whole = make_plan(parts.model, Mesh.planned({}), LogicalRules(), allow_unused=True)
        self._undeclared = types_that_may_mix_tokens(whole)
        self._stored = sum(stored_memory(whole, "adamw", (), step.state_dtypes).values())
        self._num_experts = [module.config.num_experts for module in parts.reduced.modules() if isinstance(module, MoE)]

    def candidates(self, world_size: int) -> list[Candidate]:
        """Return the meshes that divide the tokens and the experts, and count the others by the reason."""
        found = []
        known_plans: set[Hashable] = set()
        for name, rules in self.rules.items():
            known = dict.fromkeys(axis for _, axes in rules for axis in axes)
            axes = [axis for axis in known if axis not in (*ORDER, "fsdp_transpose")]
            axes += [axis for axis in ORDER if axis in known and (axis != STAGE_AXIS or self.parts.can_be_cut)]
            within = Mesh.planned({axis: 2 for axis in axes if axis != STAGE_AXIS})
            batch_axes, length_axes = token_sharding(within, rules).spec
            *_, expert_axes = activation_spec(EXPERT_TOKEN_DIMS, within, rules)
            of_weights = {axis for of, axes in rules if not of.startswith("activation") for axis in axes}
            for factors in factorisations(world_size, len(axes)):
                sizes = {axis: size for axis, size in zip(axes, factors, strict=True) if size > 1}
                parts = [_product(sizes, axes) for axes in (batch_axes, length_axes, expert_axes)]
                reason = self._why_not(sizes, *parts)
                # Rules that differ in absent axes only give the same plan.
                effective = dict.fromkeys((of, tuple(filter(sizes.__contains__, axes))) for of, axes in rules)
                same = frozenset(sizes.items()), tuple(sorted(effective, key=itemgetter(0)))
                if reason is None and same not in known_plans:
                    known_plans.add(same)
                    found.append(
                        Candidate(name, tuple(sizes.items()), _product(sizes, {*of_weights, STAGE_AXIS}), parts[2])
                    )
                elif reason is not None:
                    self.excluded[reason] += 1
        return found

    def _why_not(self, sizes: dict[str, int], batch_parts: int, length_parts: int, expert_parts: int) -> str | None:
        """Return why a mesh is not tried, or None."""
        batch_size, length, *_ = self.step
        stages, per_node = sizes.get(STAGE_AXIS, 1), self.device.ranks_per_node
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
        if per_node and any(sizes.get(axis, 1) > per_node for axis in WITHIN_NODE):
            return f"{' or '.join(WITHIN_NODE)} above the ranks of a node ({per_node})"
        return None

    def run(self, candidates: Sequence[Candidate], progress: Callable[[list[Any]], Iterable[Any]]) -> None:
        """Try every mesh with the strategy "auto", then more choices on the fastest ones; Ctrl-C ends the search.

        `progress` yields the items of a list with a progress bar.
        """
        fastest: list[tuple[float, int]] = []
        with suppress(KeyboardInterrupt):
            for candidate in progress([*candidates]):
                bound = fastest[-1][0] if len(fastest) == REFINED else math.inf
                seconds = self._try(candidate, "auto", bound, is_first=True)
                if seconds < bound:
                    bisect.insort(fastest, (seconds, self.num_tried))
                    del fastest[REFINED:]
                self.num_tried += 1
            best = [candidates[index] for _, index in fastest]
            choices = [(each, name) for each in best for name in (STRATEGIES if each.num_groups > 1 else ("auto",))]
            for candidate, dispatch in progress(choices):
                bound = sorted(plan.seconds for plan in self.found.values())[:REFINED][-1]
                self._try(candidate, dispatch, bound, is_first=False)
            self.is_refined = True

    def any_fits(self, world_size: int) -> bool:
        """Return whether one of the plans that shard most on some number of ranks fits in memory."""
        candidates = sorted(self.candidates(world_size), key=lambda candidate: -candidate.num_shards)[:NUM_TRIED]
        return any(self._try(each, "auto", math.inf, is_first=True) < math.inf for each in candidates)

    def _try(self, candidate: Candidate, dispatch: Dispatch, bound: float, *, is_first: bool) -> float:
        """Keep the plans of a mesh that fit and take less time than `bound`, and return the least time, or infinity.

        The first time, only the usual micro-batches without chunks are tried, and meshes without a plan are counted.
        """
        is_known = len(self.smallest) == NEAREST  # further plans that do not fit need not be planned
        if is_known and self._stored > self.limit * candidate.num_shards:
            self.num_over_memory += is_first
            return math.inf
        mesh, rules = Mesh.planned(dict(candidate.sizes)), self.rules[candidate.rules]
        try:
            costs = MeshCosts(self.parts, self.step, self.device, mesh, rules, dispatch)
        except ValueError as error:
            self.refused += [f"{mesh}, {candidate.rules}: {error}"] * is_first
            return math.inf
        if is_known and costs.least_memory > self.limit:
            self.num_over_memory += is_first
            return math.inf
        if dispatch == "auto" and candidate.num_groups > 1:
            dispatch = next((plan.strategy for _, plan in costs.plan.layers.values()), dispatch)
        stages, plans = mesh.size(STAGE_AXIS), list[PredictedPlan]()
        micro_batches, chunks = (USUAL_MICRO_BATCHES, CHUNKS[:1]) if is_first else (ALL_MICRO_BATCHES, CHUNKS)
        numbers = {min(times, costs.rows // stages) * stages for times in micro_batches} if stages > 1 else {1}
        for many in sorted(numbers):
            set_recompute(self.parts.reduced, ())
            if min(costs.seconds(many, number) for number in chunks) < bound:
                plans.append(self._fastest(costs, candidate.rules, dispatch, many, chunks))
        fitting = [plan for plan in plans if plan.memory <= self.limit]
        for plan in fitting:
            key = candidate, dispatch, plan.num_micro_batches
            self.found[key] = min(self.found.get(key, plan), plan, key=lambda plan: plan.seconds)
        if plans and not fitting:
            self.num_over_memory += is_first
            self.smallest = sorted([*self.smallest, *plans], key=lambda plan: plan.memory)[:NEAREST]
        return min((plan.seconds for plan in fitting), default=math.inf)

    def _fastest(
        self, costs: MeshCosts, rules: str, dispatch: Dispatch, many: int, chunks: Sequence[int]
    ) -> PredictedPlan:
        """Return the plan with the least recomputation that fits, or else with the most."""

        def memory(names: tuple[str, ...]) -> int:
            set_recompute(self.parts.reduced, names)
            return sum(costs.memory(many, chunks[0]).values())

        number = bisect.bisect_left(self._recompute, True, key=lambda names: memory(names) <= self.limit)
        names = self._recompute[min(number, len(self._recompute) - 1)]
        set_recompute(self.parts.reduced, names)
        plans = [costs.predicted(rules, dispatch, names, many, each) for each in chunks]
        return min(plans, key=lambda plan: (plan.memory > self.limit, plan.seconds))


def _product(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def search(
    module: nn.Module,
    world_size: int,
    device: Device | str,
    *,
    batch_size: int,
    sequence_length: int,
    memory: int | None = None,
    rules: Sequence[str] | None = None,
    state_dtypes: StateDtypes = PARAMETER_DTYPES,
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
            module that declares `pipeline_parts` and a `residual_stream` is cut into stages.
        world_size: number of ranks.
        device: device and network: a `Device`, the name of one, or a YAML file.
        batch_size: number of sequences per step, over all ranks.
        sequence_length: number of tokens per sequence.
        memory: bytes of a rank; None for the memory of the device.
        rules: names of presets or YAML files of rules; None for all presets.
        state_dtypes: dtypes of gradients, master weights and moments.
        num_plans: largest number of plans to return.
        progress: whether to show a progress bar, if tqdm is installed.

    Returns:
        The fastest plans in order, and what excludes the others.

    Raises:
        NoPlanFits: if no plan fits in memory, with those that need least.
        ValueError: if no mesh divides the batch, or `parallelize` refuses all plans; for a module whose saved tensors
            are not known, an unknown device or rules, and a device without a peak in the dtype of the parameters.
    """
    numbers = {"world_size": world_size, "batch_size": batch_size, "num_plans": num_plans}
    for name, value in (numbers | {"sequence_length": sequence_length}).items():
        check_int(name, value, at_least=1)
    module, device = planned_copy(module), Device.load(device)
    limit = device.memory if memory is None else memory
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"memory must be a positive number of bytes, got {limit!r}")
    parts = ModelParts(module)
    on_one_rank = make_plan(parts.reduced, Mesh.planned({}), LogicalRules(), allow_unused=True)
    step = Step(batch_size, sequence_length, parameter_dtype(on_one_rank), state_dtypes)
    batch = PlannedBatch(on_one_rank, batch_size, sequence_length, step.dtype)
    activation_memory(batch)  # raises what every mesh would raise
    device.peak(step.dtype)
    run = Search(parts, step, device, limit, preset_names() if rules is None else rules)
    candidates = run.candidates(world_size)
    if not candidates:
        reasons = ", ".join(f"{number} meshes: {reason}" for reason, number in run.excluded.items())
        raise ValueError(f"no mesh of {world_size} ranks can run the batch: {reasons or 'the rules have no axes'}")
    run.run(candidates, _with_bar if progress else iter)
    num_left = len(candidates) - run.num_tried
    if not run.found and num_left:
        raise KeyboardInterrupt
    if not run.found and not run.smallest:
        number, first = len(run.refused), run.refused[0]
        raise ValueError(
            f"no plan of {world_size} ranks can be made: {number} meshes are refused, the first one: {first}"
        )
    if not run.found:
        raise NoPlanFits(run.smallest, limit, remedies(run, world_size))
    found = {repr(replace(plan, rules="")): plan for plan in run.found.values()}  # other rules may give the same plan
    plans = sorted(found.values(), key=lambda plan: plan.seconds)[:num_plans]
    return SearchResult(
        plans=tuple(plans),
        num_considered=len(candidates),
        num_over_memory=run.num_over_memory,
        refused=run.refused,
        cannot_run=dict(run.excluded),
        num_left=num_left,
        is_refined=run.is_refined,
        limit=limit,
        world_size=world_size,
        device=device,
        step=step,
        uncounted=batch.trace().problem,
    )


def remedies(run: Search, world_size: int) -> list[str]:
    """Say what would make a plan fit: dtypes of the state, or more ranks."""
    dtypes, step = run.step.state_dtypes, run.step
    name = str(step.dtype).removeprefix("torch.")
    others = {f"moments in {name}": replace(dtypes, moments=None), "no master weights": replace(dtypes, master=None)}
    others[" and ".join(others)] = StateDtypes(gradients=dtypes.gradients)
    found = []
    for text, state_dtypes in others.items():
        if state_dtypes == dtypes:
            continue
        smaller = Search(run.parts, step._replace(state_dtypes=state_dtypes), run.device, run.limit, [*run.rules])
        if smaller.any_fits(world_size):
            found.append(f"It fits with {text}.")
            break
    larger = Search(run.parts, step, run.device, run.limit, [*run.rules])
    for factor in FACTORS:
        if larger.any_fits(factor * world_size):
            return [*found, f"It fits on {factor * world_size} ranks."]
    return [*found, f"No plan was found that fits on up to {FACTORS[-1] * world_size} ranks with this batch."]


def _with_bar(items: list[Any]) -> Iterable[Any]:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return items
    return tqdm(items, desc="planning", unit=" meshes", dynamic_ncols=True)  # type: ignore[no-any-return]
