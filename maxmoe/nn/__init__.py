"""The Mixture-of-Experts layer and its parts."""

from maxmoe.nn.declaration import TOKEN_DIMS, Declaration, LogicalNames, SavedTensor
from maxmoe.nn.dispatcher import Dispatched, Dispatcher, LocalDispatcher
from maxmoe.nn.experts import Experts, SharedExperts
from maxmoe.nn.losses import MoEStats, count_tokens, load_balance_loss, mean_over_tokens, router_z_loss
from maxmoe.nn.moe import MoE, MoEOutput
from maxmoe.nn.recompute import keep_routing
from maxmoe.nn.replay import RoutingRecord, record_routing, replay_routing
from maxmoe.nn.router import Router, Routing, normalized_scores
from maxmoe.nn.tokens import LocalTokens, TokenGroup, same_tokens_everywhere

__all__ = [
    "TOKEN_DIMS",
    "Declaration",
    "Dispatched",
    "Dispatcher",
    "Experts",
    "LocalDispatcher",
    "LocalTokens",
    "LogicalNames",
    "MoE",
    "MoEOutput",
    "MoEStats",
    "Router",
    "Routing",
    "RoutingRecord",
    "SavedTensor",
    "SharedExperts",
    "TokenGroup",
    "count_tokens",
    "keep_routing",
    "load_balance_loss",
    "mean_over_tokens",
    "normalized_scores",
    "record_routing",
    "replay_routing",
    "router_z_loss",
    "same_tokens_everywhere",
]
