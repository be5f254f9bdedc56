"""How tokens reach experts on other ranks."""

from maxmoe.dispatch import collectives
from maxmoe.dispatch.collectives import all_gather_rows, reduce_scatter_rows
from maxmoe.dispatch.partial_sums import PartialSums
from maxmoe.dispatch.ragged_all_to_all import RaggedAllToAll
from maxmoe.dispatch.ring_of_experts import RingOfExperts

# After the import of the module of that name, which takes the name in this package.
ragged_all_to_all = collectives.ragged_all_to_all

__all__ = [
    "PartialSums",
    "RaggedAllToAll",
    "RingOfExperts",
    "all_gather_rows",
    "ragged_all_to_all",
    "reduce_scatter_rows",
]
