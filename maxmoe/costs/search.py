"""Search for the fastest plans of a model on a number of ranks, of which few steps are measured."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

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
from maxmoe.text_table import with_bar

MOST_MEASURED = 12  # steps
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


class _Search:
    """Measured plans of a model: those that fit in memory are `found`, others `too_large`."""

    def __init__(self, model: nn.Module, step: Step, rules: Sequence[str]) -> None:
        self.model, self.step = model, step
        self.found: list[FoundPlan] = []
        self.too_large: list[FoundPlan] = []
        self._recompute = recompute_choices(model)
        # Least bytes beside stored ones that a token of a micro-batch has needed with each recomputation.
        self._per_token = [0.0] * len(self._recompute)
        self._measured: set[tuple[Candidate, int]] = set()
        self._peak = step.device.peak(next(each.dtype for each in model.parameters() if each.is_floating_point()))
        set_recompute(model, ())
        mesh, length = Mesh.planned({}), step.sequence_length
        alone = estimate(model, mesh, LogicalRules(), batch_size=1, sequence_length=length, allow_unused=True)
        self._flops = alone.flops * step.batch_size
        compute = computing(alone.ranks[0].work, self._peak, mesh, step.device) * step.batch_size
        self.candidates = Candidates(model, rules, step, compute)

    def least_bytes(self, candidate: Candidate, index: int) -> float:
        """Return the bytes that a candidate needs with some recomputation, by what has been measured of others."""
        return candidate.stored + self._per_token[index] * candidate.tokens

    def steps(self, candidates: Sequence[Candidate]) -> Iterator[None]:
        """Measure the fastest candidates, each with the least recomputation that fits; yield after each step."""
        num_tried = 0
        for candidate in candidates:
            for index in range(len(self._recompute)):
                if self.least_bytes(candidate, index) > self.step.device.memory:
                    continue
                if num_tried == MOST_MEASURED:
                    return
                num_tried += 1
                fits = self.measure(candidate, index)
                yield
                if fits:
                    break

    def measure(self, candidate: Candidate, index: int) -> bool:
        """Measure a step of a candidate with some recomputation; return False if it needs more memory than there is."""
        mesh, step, count = Mesh.planned(dict(candidate.sizes)), self.step, candidate.num_micro_batches
        self._measured.add((candidate, index))
        set_recompute(self.model, self._recompute[index])
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
            self.candidates.refused = f"{mesh}, {candidate.rules}: {error}"
            return True
        time = step_time(costs.ranks, count, self._peak, mesh, step.device)
        rank_seconds = time.seconds * mesh.num_ranks
        plan = FoundPlan(
            rules=candidate.rules,
            mesh=mesh.sizes,
            dispatch=candidate.dispatch,
            recompute=self._recompute[index],
            num_micro_batches=count,
            costs=costs,
            time=time,
            tokens_per_second=step.batch_size * step.sequence_length / rank_seconds,
            mfu=self._flops / rank_seconds / self._peak,
        )
        per_token = max(0.0, (plan.memory - candidate.stored) / candidate.tokens)
        self._per_token[index] = min(self._per_token[index] or per_token, per_token)
        fits = plan.memory <= step.device.memory
        (self.found if fits else self.too_large).append(plan)
        return fits

    def measure_smallest(self, candidates: Sequence[Candidate]) -> None:
        """Measure the candidate that needs least memory with the most recomputation, unless it has been measured."""
        most = len(self._recompute) - 1
        smallest = min(candidates, key=lambda each: self.least_bytes(each, most), default=None)
        if smallest is not None and (smallest, most) not in self._measured:
            self.measure(smallest, most)

    def number_that_fits(self, world_size: int) -> int | None:
        """Return a multiple of a number of ranks on which the smallest plan fits, measured; none has been found yet."""
        for number in (factor * world_size for factor in FACTORS):
            candidates = self.candidates.of(number)
            self.measure_smallest(
                [each for each in candidates if self.least_bytes(each, -1) <= self.step.device.memory]
            )
            if self.found:
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
    order of a least time, by arithmetic on their plans. Of the first ones whose parameters, gradients and optimizer
    state fit in memory, at most 12 steps are measured as by `estimate`, with the least recomputation that fits.
    Pipeline stages have the schedule 1F1B with 8 micro-batches for each stage. The optimizer is AdamW.

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
        progress: show a progress bar, if tqdm is installed.

    Returns:
        The fastest plans in order; after an interruption by Ctrl-C, the fastest of the ones that have been measured.

    Raises:
        NoPlanFits: if no plan fits in memory, with the smallest one and a number of ranks on which one fits.
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
    presets = sorted(preset_names(), key=lambda name: (name != "default", name))
    step = Step(batch_size, sequence_length, device, state_dtypes)
    run = _Search(planned_copy(module), step, presets if rules is None else rules)
    candidates = run.candidates.of(world_size)
    is_complete = False
    try:
        steps = run.steps(candidates)
        for _ in with_bar(steps, desc="measuring", total=MOST_MEASURED, unit=" steps") if progress else steps:
            pass
        is_complete = True
    except KeyboardInterrupt:
        if not run.found:
            raise
    if not run.found:
        run.measure_smallest(candidates)
    if not run.found and not run.too_large:
        raise ValueError(
            f"no plan of {world_size} ranks can run {batch_size} sequences of {sequence_length} tokens: "
            + (run.candidates.refused or "the axes of the rules divide no tokens, experts or blocks")
        )
    if not run.found:
        nearest = min(run.too_large, key=lambda plan: plan.memory)
        raise NoPlanFits(nearest, int(device.memory), run.number_that_fits(world_size))
    plans = tuple(sorted(run.found, key=lambda plan: plan.seconds)[:num_plans])
    num_measured = len(run.found) + len(run.too_large)
    return SearchResult(plans, len(candidates), num_measured, run.candidates.undeclared, is_complete)
