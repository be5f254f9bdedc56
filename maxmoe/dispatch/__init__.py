"""How tokens reach experts on other ranks."""

from maxmoe.dispatch.partial_sums import PartialSums
from maxmoe.dispatch.ragged_all_to_all import RaggedAllToAll
from maxmoe.dispatch.ring_of_experts import RingOfExperts

# isort: split
# Last: importing the module `ragged_all_to_all` above gives the package an attribute of the name of this function.
from maxmoe.dispatch.collectives import all_gather_rows, ragged_all_to_all, reduce_scatter_rows

__all__ = [
    "PartialSums",
    "RaggedAllToAll",
    "RingOfExperts",
    "all_gather_rows",
    "ragged_all_to_all",
    "reduce_scatter_rows",
]
