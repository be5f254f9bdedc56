"""Result of a search, as tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxmoe.planning.plan_search.predicted_plan import PredictedPlan
from maxmoe.text_table import paragraph, readable_bytes, terminal_width, text_table


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of `search`. As a string, tables as wide as the terminal.

    Args:
        plans: the fastest plans, in order.
        num_considered: number of plans that can run the batch: meshes with rules, micro-batches and strategies.
        num_over_memory: number of these plans that need more than `limit`.
        refused: number of these plans that `parallelize` refuses, by the reason.
        cannot_run: number of meshes with rules that cannot run the batch, by the reason.
        limit: bytes of a rank.
        num_tokens: number of tokens of a step over all ranks.
        world_size: number of ranks.
        uncounted: what is not counted, because the forward of the module cannot be traced; None if all is.
    """

    plans: tuple[PredictedPlan, ...]
    num_considered: int
    num_over_memory: int
    refused: Mapping[str, int]
    cannot_run: Mapping[str, int]
    limit: int
    num_tokens: int
    world_size: int
    uncounted: str | None = None

    def tokens_per_second(self, plan: PredictedPlan) -> float:
        """Return the predicted number of tokens per second of each rank.

        Args:
            plan: one of the plans.

        Returns:
            Tokens of the step over its time and the number of ranks.
        """
        return self.num_tokens / plan.seconds / self.world_size

    def __str__(self) -> str:
        width = terminal_width()
        head = ("plan", "rules", "mesh", "dispatch", "recomputed", "memory", "step", "tokens/s of a rank")
        rows = [head, *(self._cells(number, plan) for number, plan in enumerate(self.plans, start=1))]
        blocks = [
            *([] if self.uncounted is None else [paragraph(self.uncounted, width=width)]),
            text_table(rows, right=[5, 6, 7], width=width),
            text_table(self._costs(), right=range(1, 9), width=width),
        ]
        blocks.append("To run the first one:\n\n    " + self.plans[0].call)
        if len(self.plans) > 1:
            blocks.append(paragraph(difference(*self.plans[:2]), width=width))
        blocks.append("\n".join(self._exclusions()))
        return "\n\n".join(blocks)

    def _cells(self, number: int, plan: PredictedPlan) -> tuple[str, ...]:
        mesh = ",".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "one rank"
        mesh += f", {plan.num_micro_batches} micro-batches" if plan.has_stages else ""
        dispatch = plan.dispatch + (f", {plan.num_chunks} chunks" if plan.num_chunks > 1 else "")
        recomputed = ", ".join(plan.recompute) or "-"
        speed = f"{self.tokens_per_second(plan):,.0f}"
        memory = readable_bytes(plan.memory)
        return str(number), str(plan.rules), mesh, dispatch, recomputed, memory, f"{plan.seconds:.4g} s", speed

    def _costs(self) -> list[tuple[str, ...]]:
        heading = ("plan", "compute", "hidden", "exposed", "bubble", "FLOPs", "sent in the node", "to other nodes")
        rows: list[tuple[str, ...]] = [heading]
        for number, plan in enumerate(self.plans, start=1):
            times = (plan.compute, plan.hidden, plan.exposed, plan.bubble)
            sent = readable_bytes(plan.intra_bytes), readable_bytes(plan.inter_bytes)
            rows.append((str(number), *(f"{seconds:.3g} s" for seconds in times), f"{plan.flops:.3g}", *sent))
        return rows

    def _exclusions(self) -> Iterator[str]:
        num_slower = self.num_considered - len(self.plans) - self.num_over_memory - sum(self.refused.values())
        reasons = {
            "not among the fastest": num_slower,
            f"need more than {readable_bytes(self.limit)}": self.num_over_memory,
        }
        yield f"{self.num_considered:,} plans can run the batch. Not in the table:"
        yield from _counts({**reasons, **self.refused})
        if self.cannot_run:
            yield "Meshes that cannot run it:"
            yield from _counts(self.cannot_run)


def _counts(numbers: Mapping[str, int]) -> Iterator[str]:
    return (f"  {number:>9,}  {reason}" for reason, number in numbers.items() if number)


def difference(first: PredictedPlan, second: PredictedPlan) -> str:
    """Say which parts of a step make a plan faster than another one."""
    parts = {
        "compute": second.compute - first.compute,
        "exposed communication": second.exposed - first.exposed,
        "bubble": second.bubble - first.bubble,
    }
    gains = [f"{seconds:.3g} s less {name}" for name, seconds in parts.items() if seconds > 1e-9 * second.seconds]
    losses = [f"{-seconds:.3g} s more {name}" for name, seconds in parts.items() if -seconds > 1e-9 * second.seconds]
    total = second.seconds - first.seconds
    if not gains:
        return "The first two plans take the same time."
    text = f"The first plan is {total:.3g} s ({total / second.seconds:.1%}) faster than the second: {', '.join(gains)}"
    text += f", for {', '.join(losses)}" if losses else ""
    sent = f"{readable_bytes(first.inter_bytes)} to other nodes instead of {readable_bytes(second.inter_bytes)}"
    return f"{text}. It sends {sent}."


class NoPlanFits(ValueError):  # noqa: N818, the sentence that it says
    """No plan fits in memory.

    Attributes:
        nearest: the plans that need least memory, in order.
    """

    def __init__(self, nearest: tuple[PredictedPlan, ...], limit: int) -> None:
        self.nearest = nearest
        lines = [f"no plan fits in {readable_bytes(limit)}; the nearest:"]
        for plan in nearest:
            missing = plan.memory - limit
            lines.append(f"  {readable_bytes(missing)} ({missing} bytes) are missing for {plan.call}")
        super().__init__("\n".join(lines))
