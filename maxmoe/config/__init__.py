"""Config of a layer, and the components that it may have."""

from maxmoe.config.components import ExpertNorms, SiTU, ZeroComputation
from maxmoe.config.moe_config import LimitTarget, LoadBalanceScope, MoEConfig, Normalization, ScoreFunction

__all__ = [
    "ExpertNorms",
    "LimitTarget",
    "LoadBalanceScope",
    "MoEConfig",
    "Normalization",
    "ScoreFunction",
    "SiTU",
    "ZeroComputation",
]
