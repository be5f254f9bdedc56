"""Result of a search, as tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from maxmoe.costs.device import Device
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


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A plan and its costs, on the rank that is busy longest or needs most memory.

    Args:
        rules: name of the preset or file of rules.
        mesh: size of each axis larger than one, the outermost first.
        dispatch: strategy for experts on other ranks.
        recompute: names of the parts that are recomputed in the backward.
        num_micro_batches: number of micro-batches of a step; one without pipeline stages.
        memory_parts: bytes of the rank that needs most, by purpose as in `Estimate.memory`.
        time: parts of the time of a step.
        flops: floating-point operations of products and attention in a step, on the rank with the most.
        tokens_per_second: of each rank.
        mfu: floating-point operations without recomputation per second, as a share of the peak of the device: the model
            FLOPs utilization.
    """

    rules: str
    mesh: dict[str, int]
    dispatch: Dispatch
    recompute: tuple[str, ...]
    num_micro_batches: int
    memory_parts: dict[str, int]
    time: StepTime
    flops: int
    tokens_per_second: float
    mfu: float

    @property
    def memory(self) -> int:
        """Bytes of the rank that needs most."""
        return sum(self.memory_parts.values())

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


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of `search`. As a string, tables as wide as the terminal.

    Args:
        world_size: number of ranks.
        device: device and network; its memory is the limit.
        plans: the fastest plans, in order.
        num_considered: number of meshes with rules and a strategy that divide the tokens and the experts.
        num_over_memory: number of them whose parameters, gradients and optimizer state do not fit in memory.
        num_measured: number of steps that were measured.
        refused: for those that `parallelize` refuses, the error.
        cannot_run: number of meshes with rules that are not tried, by the reason.
        is_complete: whether the search was not interrupted.
    """

    world_size: int
    device: Device
    plans: Sequence[FoundPlan]
    num_considered: int
    num_over_memory: int
    num_measured: int
    refused: Sequence[str]
    cannot_run: Mapping[str, int]
    is_complete: bool

    def __str__(self) -> str:
        plans = [PLANS, *((str(number), *plan.row()) for number, plan in enumerate(self.plans, start=1))]
        parts = self.plans[0].memory_parts.items()
        memory = [("memory of plan 1", "bytes"), *((name, readable_bytes(count)) for name, count in parts)]
        call = f"To run plan 1:\n\n    {self.plans[0].call}"
        return report([HEAD, plans, memory, call, "\n".join(self._exclusions())])

    def _exclusions(self) -> Iterator[str]:
        end = "" if self.is_complete else ", then the search was interrupted"
        yield f"{self.num_considered:,} meshes with rules and a strategy divide tokens and experts."
        yield f"{self.num_measured:,} steps were measured, of those with the least time by arithmetic{end}."
        yield from _counts({f"cannot store the model in {readable_bytes(self.device.memory)}": self.num_over_memory})
        if self.refused:
            yield from _counts({f"are refused by parallelize, the first one is {self.refused[0]}": len(self.refused)})
        if self.cannot_run:
            yield "Meshes with rules that were not tried:"
            yield from _counts(self.cannot_run)
        yield "Not tried: fsdp_transpose, other orders of the axes, schedules, numbers of micro-batches, chunks, Muon."


def _counts(numbers: Mapping[str, int]) -> Iterator[str]:
    return (f"  {number:>9,}  {reason}" for reason, number in numbers.items() if number)


class NoPlanFits(ValueError):  # noqa: N818, the sentence that it says
    """No plan fits in memory.

    Attributes:
        nearest: the plans that need least memory, in order.
        num_ranks: a number of ranks on which one fits; None if none was found.
    """

    def __init__(self, nearest: Sequence[FoundPlan], limit: int, num_ranks: int | None) -> None:
        self.nearest, self.num_ranks = tuple(nearest), num_ranks
        lines = [f"no plan fits in {readable_bytes(limit)}; the nearest:"]
        for plan in nearest:
            missing = plan.memory - limit
            lines.append(f"  {readable_bytes(missing)} ({missing} bytes) are missing for {plan.call}")
        least = "No plan was found that fits on more ranks with this batch."
        lines.append(least if num_ranks is None else f"It fits on {num_ranks} ranks.")
        super().__init__("\n".join(lines))
