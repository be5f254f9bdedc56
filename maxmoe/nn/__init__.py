"""The Mixture-of-Experts layer and its parts."""

from maxmoe.nn.experts import Experts, SharedExperts
from maxmoe.nn.losses import load_balance_loss, normalized_scores, router_z_loss
from maxmoe.nn.moe import MoE, MoEOutput, MoEStats
from maxmoe.nn.parallel import TOKENS, Activation, LogicalNames, TokenLayout, WholeBatch, same_tokens_everywhere
from maxmoe.nn.recompute import keep_routing
from maxmoe.nn.router import Router, Routing

__all__ = [
    "TOKENS",
    "Activation",
    "Experts",
    "LogicalNames",
    "MoE",
    "MoEOutput",
    "MoEStats",
    "Router",
    "Routing",
    "SharedExperts",
    "TokenLayout",
    "WholeBatch",
    "keep_routing",
    "load_balance_loss",
    "normalized_scores",
    "router_z_loss",
    "same_tokens_everywhere",
]
