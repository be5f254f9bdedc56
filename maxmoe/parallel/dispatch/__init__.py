"""Dispatch strategies: communication of tokens with the experts on other ranks."""

from maxmoe.parallel.dispatch.collectives import (
    all_gather_replicated_rows,
    all_gather_rows,
    ragged_all_to_all,
    reduce_scatter_rows,
)
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout, ExpertRanks
from maxmoe.parallel.dispatch.least_loaded import LeastLoaded
from maxmoe.parallel.dispatch.partial_sums import PartialSums
from maxmoe.parallel.dispatch.planned_dispatch import LocalStrategy, PlannedDispatch, Strategy
from maxmoe.parallel.dispatch.ragged_all_gather import RaggedAllGather
from maxmoe.parallel.dispatch.ragged_dispatcher import RaggedAllToAll
from maxmoe.parallel.dispatch.ring_of_experts import RingOfExperts

__all__ = [
    "ExpertLayout",
    "ExpertRanks",
    "LeastLoaded",
    "LocalStrategy",
    "PartialSums",
    "PlannedDispatch",
    "RaggedAllGather",
    "RaggedAllToAll",
    "RingOfExperts",
    "Strategy",
    "all_gather_replicated_rows",
    "all_gather_rows",
    "ragged_all_to_all",
    "reduce_scatter_rows",
]
