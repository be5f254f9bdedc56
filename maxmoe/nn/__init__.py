"""Mixture-of-Experts layer and its parts."""

# First: names a torch that does not fit before another module misses something in that torch.
from maxmoe import _C as _C

# isort: split
from maxmoe.declaration import Declaration, LogicalNames, ResidualStream
from maxmoe.nn.dispatcher import Dispatched, Dispatcher, ExpertRunner, Future, LayerInputs, TensorParallelRegion
from maxmoe.nn.experts import Experts, ExpertWeights, ForeignExperts
from maxmoe.nn.feed_forward import MoEFeedForward, set_aux_loss_scale
from maxmoe.nn.layer import MoELayer
from maxmoe.nn.local_dispatcher import LocalCounts, LocalDispatcher, LocalExperts, local_dispatcher
from maxmoe.nn.losses import BalanceLoss, count_tokens, load_balance_loss, mean_over_tokens, router_z_loss
from maxmoe.nn.moe import MoE
from maxmoe.nn.output import MoEOutput, StatefulMoEOutput
from maxmoe.nn.parts import LatentProjection, SharedExperts, ZeroComputationExperts
from maxmoe.nn.random_numbers import rand_of_tokens
from maxmoe.nn.replay import record_routing, replay_routing
from maxmoe.nn.rms_norm import LatentNorm
from maxmoe.nn.router import Router, balanced_bias, required_bias_histogram
from maxmoe.nn.routing import Routing, TopK
from maxmoe.nn.routing_record import RoutingRecord
from maxmoe.nn.selection import Selection
from maxmoe.nn.sum_normalization import SumNormalization
from maxmoe.nn.windows import Buffer, Window, Windows
from maxmoe.ranks.token_group import LocalTokens, TokenGroup, TokenGroupAttribute, same_tokens_everywhere
from maxmoe.recompute.named_parts import Checkpointed, check_recompute, recompute_of, set_recompute
from maxmoe.recompute.selective import keep_routing

__all__ = [
    "BalanceLoss",
    "Buffer",
    "Checkpointed",
    "Declaration",
    "Dispatched",
    "Dispatcher",
    "ExpertRunner",
    "ExpertWeights",
    "Experts",
    "ForeignExperts",
    "Future",
    "LatentNorm",
    "LatentProjection",
    "LayerInputs",
    "LocalCounts",
    "LocalDispatcher",
    "LocalExperts",
    "LocalTokens",
    "LogicalNames",
    "MoE",
    "MoEFeedForward",
    "MoELayer",
    "MoEOutput",
    "ResidualStream",
    "Router",
    "Routing",
    "RoutingRecord",
    "Selection",
    "SharedExperts",
    "StatefulMoEOutput",
    "SumNormalization",
    "TensorParallelRegion",
    "TokenGroup",
    "TokenGroupAttribute",
    "TopK",
    "Window",
    "Windows",
    "ZeroComputationExperts",
    "balanced_bias",
    "check_recompute",
    "count_tokens",
    "keep_routing",
    "load_balance_loss",
    "local_dispatcher",
    "mean_over_tokens",
    "rand_of_tokens",
    "recompute_of",
    "record_routing",
    "replay_routing",
    "required_bias_histogram",
    "router_z_loss",
    "same_tokens_everywhere",
    "set_aux_loss_scale",
    "set_recompute",
]
