"""Sharding of tensors over ranks: mesh, partition spec, and rules that map logical names to mesh axes."""

from maxmoe.sharding.mesh import Mesh, parse_mesh
from maxmoe.sharding.named_sharding import NamedSharding, P, PartitionSpec
from maxmoe.sharding.redistribute import redistribute
from maxmoe.sharding.rules import DroppedAxis, LogicalRules, Resolution, check_used, logical_to_mesh_axes, resolve
from maxmoe.sharding.shard_map import shard_map

__all__ = [
    "DroppedAxis",
    "LogicalRules",
    "Mesh",
    "NamedSharding",
    "P",
    "PartitionSpec",
    "Resolution",
    "check_used",
    "logical_to_mesh_axes",
    "parse_mesh",
    "redistribute",
    "resolve",
    "shard_map",
]
