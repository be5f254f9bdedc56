"""`parallelize` for modules on a mesh, their declarations and plans, and functions for distributed training scripts."""

from maxmoe.adapters import adapter_state_dict
from maxmoe.declaration import Declaration, LogicalNames, PipelineParts, ResidualStream
from maxmoe.parallel.apply.initialization import reset_parameters
from maxmoe.parallel.apply.shard_parameters import shard_parameters
from maxmoe.parallel.clip_grad_norm import clip_grad_norm_
from maxmoe.parallel.grad_scaler import GradScaler
from maxmoe.parallel.parallelize import parallelize
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.parameter_sharding import ParameterSharding, logical_names, parameter_shardings
from maxmoe.parallel.plan.plan import ParameterPlan, Plan
from maxmoe.parallel.plan.sharded_tokens import token_group, token_sharding
from maxmoe.ranks.failures import RankError, watch_ranks
from maxmoe.ranks.token_group import TokenGroup

__all__ = [
    "Declaration",
    "Dispatch",
    "GradScaler",
    "LogicalNames",
    "ParameterPlan",
    "ParameterSharding",
    "PipelineParts",
    "Plan",
    "RankError",
    "ResidualStream",
    "TokenGroup",
    "adapter_state_dict",
    "clip_grad_norm_",
    "logical_names",
    "parallelize",
    "parameter_shardings",
    "reset_parameters",
    "shard_parameters",
    "token_group",
    "token_sharding",
    "watch_ranks",
]
