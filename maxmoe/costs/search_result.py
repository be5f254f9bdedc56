"""Result of a search, as tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from maxmoe.costs.report import Estimate
from maxmoe.costs.step_time import StepTime
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding.mesh import STAGE_AXIS
from maxmoe.text_table import readable_bytes, report

ERRORS = (-59, 66)  # percent, of the tokens per second of published runs: the table of docs/costs.md
HEAD = (
    "A ranking by a model of time, not a promise: for seven published runs of other libraries it says from "
    f"{-ERRORS[0]} % fewer to {ERRORS[1]} % more tokens per second (docs/costs.md). Memory and bytes are counted "
    "as by `estimate`."
)
PLANS = ("plan", "rules", "mesh", "dispatch", "recomputed", "memory", "step", "exposed", "tokens/s of a rank", "MFU")
NOT_TRIED = "fsdp_transpose, other orders of the axes, schedules, numbers of micro-batches, chunks, Muon"


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A plan and its costs.

    Args:
        rules: name of the preset or file of rules.
        mesh: size of each axis larger than one, the outermost first.
        dispatch: strategy for experts on other ranks.
        recompute: names of the parts that are recomputed in the backward.
        num_micro_batches: number of micro-batches of a step; one without pipeline stages.
        costs: memory, collectives and operators of a step.
        time: parts of the time of a step, on the rank that is busy longest.
        tokens_per_second: of each rank.
        mfu: floating-point operations without recomputation per second, as a share of the peak of the device: the model
            FLOPs utilization.
    """

    rules: str
    mesh: dict[str, int]
    dispatch: Dispatch
    recompute: tuple[str, ...]
    num_micro_batches: int
    costs: Estimate
    time: StepTime
    tokens_per_second: float
    mfu: float

    @property
    def memory(self) -> int:
        """Bytes of the rank that needs most."""
        return sum(self.costs.memory.values())

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.time.seconds

    @property
    def has_stages(self) -> bool:
        """Whether the plan cuts the model into pipeline stages."""
        return STAGE_AXIS in self.mesh

    @property
    def call(self) -> str:
        """Python code that runs a `model` with the plan."""
        options = f"Mesh({self.mesh or {'data': 1}}), {self.rules!r}, dispatch={self.dispatch!r}"
        options += f", recompute={self.recompute!r}"
        if not self.has_stages:
            return f"model = maxmoe.parallelize(model, {options})"
        options += f', schedule="1f1b", num_micro_batches={self.num_micro_batches}'
        return f"pipeline = maxmoe.pipeline(model, {options}, loss=loss)"

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one rank"
        mesh += f", {self.num_micro_batches} micro-batches" if self.has_stages else ""
        choice = self.rules, mesh, self.dispatch, ", ".join(self.recompute) or "-", readable_bytes(self.memory)
        share = f"{self.time.exposed / self.seconds:.0%}"
        return *choice, f"{self.seconds:.4g} s", share, f"{self.tokens_per_second:,.0f}", f"{self.mfu:.0%}"


@dataclass(frozen=True)
class SearchResult:
    """Result of `search`. As a string, tables as wide as the terminal.

    Args:
        plans: the fastest plans, in order.
        num_considered: number of meshes with rules and a strategy that divide the tokens and the experts.
        num_measured: number of steps that were measured.
        undeclared: types of modules that declare nothing and may mix tokens, so that sequences are not sharded.
        is_complete: whether the search was not interrupted.
    """

    plans: Sequence[FoundPlan]
    num_considered: int
    num_measured: int
    undeclared: Sequence[str] = ()
    is_complete: bool = True

    def __str__(self) -> str:
        plans = [PLANS, *((str(number), *plan.row()) for number, plan in enumerate(self.plans, start=1))]
        first = self.plans[0]
        memory = [(name, readable_bytes(count)) for name, count in first.costs.memory.items()]
        call = f"To run plan 1:\n\n    {first.call}"
        end = "" if self.is_complete else ", then the search was interrupted"
        remarks = (
            f"{self.num_considered:,} meshes with rules and a strategy divide tokens and experts. {self.num_measured} "
            f"steps were measured, of those with the least time by arithmetic{end}. Not tried: {NOT_TRIED}."
        )
        if self.undeclared:
            remarks += (
                f" Sequences are not sharded, because {', '.join(self.undeclared)} declare nothing and may mix tokens"
            )
            remarks += " (needs_whole_sequences of maxmoe.parallel.Declaration)."
        return report([HEAD, plans, [("memory of plan 1", "bytes"), *memory], call, remarks])


class NoPlanFits(ValueError):  # noqa: N818, the sentence that it says
    """No plan fits in memory.

    Attributes:
        nearest: the plan that needs least memory, of those that were measured.
        num_ranks: a number of ranks on which one fits; None if none was found.
    """

    def __init__(self, nearest: FoundPlan, limit: int, num_ranks: int | None) -> None:
        self.nearest, self.num_ranks = nearest, num_ranks
        missing = nearest.memory - limit
        more = "No plan was found that fits on more ranks with this batch."
        super().__init__(
            f"no plan fits in {readable_bytes(limit)}: {readable_bytes(missing)} ({missing} bytes) are missing for\n"
            f"  {nearest.call}\n{more if num_ranks is None else f'It fits on {num_ranks} ranks.'}"
        )
