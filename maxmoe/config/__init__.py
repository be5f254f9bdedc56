"""Config of a layer, and the components that it may have: rules of few families, each with its own numbers."""

from maxmoe.config.components import (
    ActivationRule,
    Component,
    ExpertNorms,
    RouterRule,
    Scored,
    SiTU,
    ZeroComputation,
    component,
)
from maxmoe.config.moe_config import LimitTarget as LimitTarget
from maxmoe.config.moe_config import LoadBalanceScope as LoadBalanceScope
from maxmoe.config.moe_config import MoEConfig
from maxmoe.config.moe_config import Normalization as Normalization
from maxmoe.config.moe_config import ScoreFunction as ScoreFunction

__all__ = [
    "ActivationRule",
    "Component",
    "ExpertNorms",
    "MoEConfig",
    "RouterRule",
    "Scored",
    "SiTU",
    "ZeroComputation",
    "component",
]
