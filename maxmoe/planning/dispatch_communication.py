"""The collectives of Mixture-of-Experts layers: tokens travel to experts, and partial outputs are summed."""

from collections.abc import Iterator

from maxmoe.parallel.plan import Plan
from maxmoe.planning.saved_tensors import planned_dispatches
from maxmoe.sharding.planned_collective import PlannedCollective


def dispatch_communication(
    plan: Plan, batch_size: int, sequence_length: int, num_chunks: int = 1
) -> Iterator[tuple[str, PlannedCollective]]:
    """List the collectives of Mixture-of-Experts layers, if every expert of a layer gets as many tokens.

    Args:
        plan: of the model.
        batch_size: sequences of a step, over all ranks.
        sequence_length: their tokens.
        num_chunks: see `maxmoe.parallelize`.

    Yields:
        The path of the layer, and the collective.

    Raises:
        ValueError: if the axes that shard the tokens do not divide them.
    """
    for path, tokens in planned_dispatches(plan, batch_size, sequence_length, num_chunks):
        dispatch_plan = plan.dispatch_plans[path]
        for chunk in tokens.chunks():
            for collective in dispatch_plan.strategy_class.planned_collectives(chunk):
                yield path, collective
        for collective in dispatch_plan.partial_sums.planned_collectives(tokens):
            yield path, collective
