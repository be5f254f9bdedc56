"""Result of a search, as tables."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from maxmoe.planning.device import Device
from maxmoe.planning.predict import PredictedPlan, Step
from maxmoe.text_table import readable_bytes, report

TIE = 1.03  # plans whose times differ by less are not told apart
ERRORS = (-61, 83)  # percent, of the predictions for published runs: the table of docs/planning.md
HEAD = (
    "A ranking by a model of time, not a promise: for seven published runs of other libraries it predicts from "
    f"{-ERRORS[0]} % fewer to {ERRORS[1]} % more tokens per second (docs/planning.md)."
)
NOT_TRIED = (
    "Not tried at all: fsdp_transpose, other orders of the axes, other schedules than 1F1B, several stages per rank, "
    "Muon. Not tried on all but the fastest meshes: other strategies than auto, chunks, and numbers of micro-batches "
    "other than 8 for each stage."
)
PLANS = ("plan", "rules", "mesh", "dispatch", "recomputed", "memory", "step", "tokens/s of a rank", "MFU")
COSTS = ("plan", "compute", "hidden", "exposed", "bubble", "FLOPs", "sent in the node", "to other nodes")


@dataclass(kw_only=True)
class SearchResult:
    """Result of `search`. As a string, tables as wide as the terminal.

    Args:
        world_size: number of ranks.
        device: device and network; its memory is the limit.
        step: tokens and dtypes.
        uncounted: what is not counted, because the forward of the module cannot be traced; None if all is.
        plans: the fastest plans, in order.
        num_considered: number of meshes with rules that divide the tokens and the experts.
        num_over_memory: number of them without a plan that fits in memory.
        refused: for those that `parallelize` refuses, the error.
        cannot_run: number of meshes with rules that are not tried, by the reason.
        num_left: number of meshes that were not tried, because the search was interrupted.
        is_refined: whether all strategies, chunks and numbers of micro-batches were tried on the fastest meshes.
    """

    world_size: int
    device: Device
    step: Step
    uncounted: str | None = None
    plans: Sequence[PredictedPlan] = ()
    num_considered: int = 0
    num_over_memory: int = 0
    refused: list[str] = field(default_factory=list)
    cannot_run: Counter[str] = field(default_factory=Counter)
    num_left: int = 0
    is_refined: bool = False

    def tokens_per_second(self, plan: PredictedPlan) -> float:
        """Return the predicted number of tokens per second of each rank with one of the plans."""
        return self.step.batch_size * self.step.sequence_length / plan.seconds / self.world_size

    def __str__(self) -> str:
        plans: list[tuple[str, ...]] = [PLANS]
        costs: list[tuple[str, ...]] = [COSTS]
        for number, plan in enumerate(self.plans, start=1):
            mesh = ",".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "one rank"
            mesh += f", {plan.num_micro_batches} micro-batches" if plan.has_stages else ""
            dispatch = plan.dispatch + (f", {plan.num_chunks} chunks" if plan.num_chunks > 1 else "")
            choice = str(plan.rules), mesh, dispatch, ", ".join(plan.recompute) or "-", readable_bytes(plan.memory)
            rate = f"{plan.seconds:.4g} s", f"{self.tokens_per_second(plan):,.0f}", f"{plan.mfu:.0%}"
            plans.append((str(number), *choice, *rate))
            times = [f"{seconds:.3g} s" for seconds in (plan.compute, plan.hidden, plan.exposed, plan.bubble)]
            sent = readable_bytes(plan.intra_bytes), readable_bytes(plan.inter_bytes)
            costs.append((str(number), *times, f"{plan.flops:.3g}", *sent))
        parts = self.plans[0].memory_parts.items()
        memory = [("memory of plan 1", "bytes"), *((name, readable_bytes(count)) for name, count in parts)]
        assumed = f"Assumed for plan 1: {assumptions(self.device, self.step)}"
        call = f"To run plan 1:\n\n    {self.plans[0].call}"
        exclusions = "\n".join(self._exclusions())
        first = HEAD, self.uncounted or ""
        return report([*first, plans, "\n".join(ties(self.plans)), costs, memory, assumed, call, exclusions])

    def _exclusions(self) -> Iterator[str]:
        if self.num_left:
            yield f"Interrupted: {self.num_left:,} of {self.num_considered:,} meshes with rules were not tried."
        elif not self.is_refined:
            yield "Interrupted: not all strategies, chunks and micro-batches were tried on the fastest meshes."
        tried = f"{self.num_considered:,} meshes with rules divide tokens and experts."
        yield f"{tried} Of these have no plan:" if self.num_over_memory or self.refused else tried
        yield from _counts({f"need more than {readable_bytes(self.device.memory)}": self.num_over_memory})
        if self.refused:
            yield from _counts({f"are refused by parallelize, the first one is {self.refused[0]}": len(self.refused)})
        if self.cannot_run:
            yield "Meshes with rules that were not tried:"
            yield from _counts(self.cannot_run)
        yield NOT_TRIED


def _counts(numbers: Mapping[str, int]) -> Iterator[str]:
    return (f"  {number:>9,}  {reason}" for reason, number in numbers.items() if number)


def assumptions(device: Device, step: Step) -> str:
    """Say the dtypes of a plan, and what the model of time takes from the device."""
    dtypes = {"parameters and activations": step.dtype, **step.state_dtypes.of_parameters(step.dtype)}
    stored = ", ".join(f"{str(dtype).removeprefix('torch.')} {name}" for name, dtype in dtypes.items())
    return (
        f"{stored}. Products reach "
        f"{device.max_share:.0%} of the peak of "
        f"{device.peak(step.dtype) / 1e12:,.4g} TFLOPS, with {device.half_rows:g} rows half of that; attention "
        f"{device.attention_share:.0%}. A rank reads and writes {device.memory_bandwidth / 1e9:,.4g} GB/s, and sends "
        f"{device.intra_node.bandwidth / 1e9:.4g} GB/s within its node and {device.inter_node.bandwidth / 1e9:.4g} "
        f"GB/s to others. {device.overlap:.0%} of the communication that is started early runs beside products. Every "
        "expert gets equally many tokens (imbalance 1.0)."
    )


def ties(plans: Sequence[PredictedPlan]) -> Iterator[str]:
    """Yield, for each group of plans within 3 % of its fastest, a sentence that says in what they differ."""
    begin = 0
    while begin < len(plans):
        end = next((n for n in range(begin, len(plans)) if plans[n].seconds > TIE * plans[begin].seconds), len(plans))
        if end - begin > 1:
            yield (
                f"Plans {begin + 1} to {end} differ by less than {TIE - 1:.0%}, which the model cannot tell apart, in "
                f"{differences(plans[begin:end])}."
            )
        begin = end


def differences(plans: Sequence[PredictedPlan]) -> str:
    """Say which settings differ between plans, such as "data (1, 2, 8), rules (default, ep-as-dp)"."""
    axes = dict.fromkeys(axis for plan in plans for axis in plan.mesh)
    values: dict[str, list[object]] = {axis: [plan.mesh.get(axis, 1) for plan in plans] for axis in axes}
    named = {"rules": "rules", "dispatch": "dispatch", "micro-batches": "num_micro_batches", "chunks": "num_chunks"}
    values |= {label: [getattr(plan, name) for plan in plans] for label, name in named.items()}
    values["recomputed"] = [" ".join(plan.recompute) or "nothing" for plan in plans]
    return ", ".join(
        f"{name} ({', '.join(map(str, dict.fromkeys(of_plans)))})"
        for name, of_plans in values.items()
        if len(set(map(str, of_plans))) > 1
    )


class NoPlanFits(ValueError):  # noqa: N818, the sentence that it says
    """No plan fits in memory.

    Attributes:
        nearest: the plans that need least memory, in order.
    """

    def __init__(self, nearest: Sequence[PredictedPlan], limit: int, remedies: Iterable[str]) -> None:
        self.nearest = tuple(nearest)
        lines = [f"no plan fits in {readable_bytes(limit)}; the nearest:"]
        for plan in nearest:
            missing = plan.memory - limit
            lines.append(f"  {readable_bytes(missing)} ({missing} bytes) are missing for {plan.call}")
        lines += remedies
        super().__init__("\n".join(lines))
