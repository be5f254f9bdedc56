"""Which part of every tensor each rank holds: logical names for dims, and rules from names to mesh axes."""

from maxmoe.sharding.partition_spec import P, PartitionSpec
from maxmoe.sharding.resolve import DroppedAxis, Resolution, logical_to_mesh_axes, resolve
from maxmoe.sharding.rules import LogicalRules

__all__ = ["DroppedAxis", "LogicalRules", "P", "PartitionSpec", "Resolution", "logical_to_mesh_axes", "resolve"]
