"""Which part of every tensor each rank holds: logical names for dims, and rules from names to mesh axes."""

from maxmoe.sharding.assign import Assignment, assign, logical_names
from maxmoe.sharding.estimate import Estimate, estimate
from maxmoe.sharding.explain import Explanation, explain
from maxmoe.sharding.gradients import clip_grad_norm_
from maxmoe.sharding.initialization import reset_parameters
from maxmoe.sharding.mesh import Mesh, parse_mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.parallelize import parallelize
from maxmoe.sharding.partition_spec import P, PartitionSpec
from maxmoe.sharding.reshard import reshard, shard_map
from maxmoe.sharding.resolve import DroppedAxis, Resolution, logical_to_mesh_axes, resolve
from maxmoe.sharding.rules import LogicalRules
from maxmoe.sharding.shard_parameters import shard_parameters
from maxmoe.sharding.sharded_tokens import token_sharding

__all__ = [
    "Assignment",
    "DroppedAxis",
    "Estimate",
    "Explanation",
    "LogicalRules",
    "Mesh",
    "NamedSharding",
    "P",
    "PartitionSpec",
    "Resolution",
    "assign",
    "clip_grad_norm_",
    "estimate",
    "explain",
    "logical_names",
    "logical_to_mesh_axes",
    "parallelize",
    "parse_mesh",
    "reset_parameters",
    "reshard",
    "resolve",
    "shard_map",
    "shard_parameters",
    "token_sharding",
]
