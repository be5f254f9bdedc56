"""Dispatch strategies: communication of tokens with the experts on other ranks."""

from maxmoe.parallel.dispatch.collectives import all_gather_rows, ragged_all_to_all, reduce_scatter_rows
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout, ExpertRanks
from maxmoe.parallel.dispatch.least_loaded import LeastLoaded
from maxmoe.parallel.dispatch.partial_sums import PartialSums
from maxmoe.parallel.dispatch.ragged_dispatcher import RaggedAllToAll
from maxmoe.parallel.dispatch.ring_of_experts import RingOfExperts
from maxmoe.parallel.dispatch.strategy import LocalStrategy, Received, Strategy

__all__ = [
    "ExpertLayout",
    "ExpertRanks",
    "LeastLoaded",
    "LocalStrategy",
    "PartialSums",
    "RaggedAllToAll",
    "Received",
    "RingOfExperts",
    "Strategy",
    "all_gather_rows",
    "ragged_all_to_all",
    "reduce_scatter_rows",
]
