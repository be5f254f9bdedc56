"""Dispatch strategies: communication of tokens with the experts on other ranks."""

from maxmoe.dispatch.collectives import (
    all_gather_replicated_rows,
    all_gather_rows,
    ragged_all_to_all,
    reduce_scatter_rows,
)
from maxmoe.dispatch.expert_ranks import ExpertLayout, ExpertRanks
from maxmoe.dispatch.least_loaded import LeastLoaded
from maxmoe.dispatch.partial_sums import PartialSums
from maxmoe.dispatch.planned_dispatch import LocalStrategy, PlannedDispatch, Strategy
from maxmoe.dispatch.ragged_all_gather import RaggedAllGather
from maxmoe.dispatch.ragged_dispatcher import RaggedAllToAll
from maxmoe.dispatch.ring_of_experts import RingOfExperts

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
