"""Load of the experts: routing statistics of a call, and their sums over the micro-batches of an optimizer step."""

from maxmoe.load.stats import MoEStats
from maxmoe.load.stats_accumulator import StatsAccumulator, StepStats

__all__ = ["MoEStats", "StatsAccumulator", "StepStats"]
