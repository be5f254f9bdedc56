"""Stages of a pipeline and costs of its ranks, as tables."""

from dataclasses import dataclass

from maxmoe.planning.pipeline_plan import PipelinePlan
from maxmoe.text_table import paragraph, readable_bytes, terminal_width, text_table

HEADINGS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "unsharded gradients": "unsharded",
    "gathered parameters": "gathered",
    "activations": "activations",
    "recomputed activations": "recomputed",
}


@dataclass(frozen=True)
class RankEstimate:
    """Costs of a rank along the axis `stage`.

    Args:
        stages: stages of the rank.
        in_flight: for each of them, the largest number of micro-batches whose forward has run and whose backward has
            not.
        memory: bytes by purpose, at the moment when the micro-batches in flight take the most. "unsharded gradients"
            are those of whole parameters, which FSDP2 keeps until the end of the step.
        sent_bytes: bytes that the rank sends to the ranks of other stages in a step.
        work: multiplications per token with weights, relative to the mean over the ranks.
        idle: share of the step in which the rank computes nothing.
    """

    stages: tuple[int, ...]
    in_flight: tuple[int, ...]
    memory: dict[str, int]
    sent_bytes: int
    work: float
    idle: float

    @property
    def total(self) -> int:
        """Bytes of all purposes."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class PipelineEstimate:
    """Costs of all ranks along the axis `stage`.

    Args:
        plan: plans of the stages, order and times of their actions.
        ranks: costs of each rank.
    """

    plan: PipelinePlan
    ranks: tuple[RankEstimate, ...]

    @property
    def largest(self) -> int:
        """Rank that needs the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    def __str__(self) -> str:
        # The columns of what no rank has are left out.
        purposes = [name for name in self.ranks[0].memory if any(rank.memory[name] for rank in self.ranks)]
        headings = [HEADINGS.get(name, name) for name in purposes]
        rows = [("stage" if self.plan.num_ranks == len(self.plan.stages) else "stages", *headings, "total", "sent")]
        for rank in self.ranks:
            numbers = [rank.memory[name] for name in purposes]
            cells = map(readable_bytes, [*numbers, rank.total, rank.sent_bytes])
            rows.append((", ".join(map(str, rank.stages)), *cells))
        width = terminal_width()
        return text_table(rows, right=range(1, len(rows[0])), width=width)


def stage_table(plan: PipelinePlan) -> str:
    """Return a table of the stages, and the times of the schedule."""
    rows = [("stage", "rank", "parts", "parameters", "bytes", "work", "in flight", "idle")]
    for stage in plan.stages:
        stored = sum(parameter.bytes(parameter.stored) for parameter in stage.plan.parameters.values())
        rows.append(
            (
                str(stage.index),
                str(stage.rank),
                stage.parts,
                f"{stage.num_parameters:,}",
                readable_bytes(stored),
                f"{stage.work:.2f}",
                str(plan.max_in_flight(stage.rank)[stage.index]),
                f"{plan.timeline.idle(stage.rank):.1%}",
            )
        )
    width = terminal_width()
    table = text_table(rows, right=[1, 3, 4, 5, 6, 7], width=width)
    return "\n".join([table, *(paragraph(line, width=width) for line in schedule_lines(plan))])


def schedule_lines(plan: PipelinePlan) -> list[str]:
    """Say how long ranks wait, and which is the slowest."""
    options, rank = plan.options, plan.slowest
    stages = plan.stages_of(rank)
    names = f"stage{'s' * (len(stages) > 1)} {' and '.join(str(stage.index) for stage in stages)}"
    return [
        f"Schedule {options.schedule}, {options.num_micro_batches} micro-batches: a rank is idle for "
        f"{plan.timeline.bubble:.1%} of a step on average (the bubble), {plan.smallest_bubble:.1%} if all stages had "
        "the same work. Messages and collectives are taken to need no time.",
        f"Most work: {names}, {plan.work(rank):.2f} times the mean of the ranks.",
    ]
