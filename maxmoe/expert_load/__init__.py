"""Load of the experts: routing statistics of a call, their sums over an optimizer step, and their record over a run."""

from maxmoe.expert_load.history import LayerLoad, LoadHistory
from maxmoe.expert_load.stats import MoEStats
from maxmoe.expert_load.stats_accumulator import StatsAccumulator, StepStats

__all__ = ["LayerLoad", "LoadHistory", "MoEStats", "StatsAccumulator", "StepStats"]
