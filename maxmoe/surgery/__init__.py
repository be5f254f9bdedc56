"""Surgery of experts: prune, merge, duplicate and freeze single experts of the MoE layers of a model.

The router, the state of the optimizer and the config of a layer follow. Everything is checked before a tensor changes.
"""

from maxmoe.surgery.experts import duplicate_experts, merge_experts, prune_experts
from maxmoe.surgery.freezing import FrozenExperts, freeze_experts

__all__ = [
    "FrozenExperts",
    "duplicate_experts",
    "freeze_experts",
    "merge_experts",
    "prune_experts",
]
