"""Surgery of experts: prune, merge and duplicate single experts of the MoE layers of a model.

The router, the state of the optimizer and the config of a layer follow. Everything is checked before a tensor changes.
"""

from maxmoe.convert.surgery.experts import duplicate_experts, merge_experts, prune_experts

__all__ = ["duplicate_experts", "merge_experts", "prune_experts"]
