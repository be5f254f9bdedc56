"""Which part of every tensor each rank holds."""

from maxmoe.sharding.partition_spec import P, PartitionSpec

__all__ = ["P", "PartitionSpec"]
