"""Muon for the matrices of blocks, stacked ones included, and AdamW for all else; on one process or a mesh."""

from maxmoe.optim.choice import Choice, Override
from maxmoe.optim.matrix import Matrix
from maxmoe.optim.muon import Muon
from maxmoe.optim.parameter_groups import ParameterGroups, parameter_groups

__all__ = ["Choice", "Matrix", "Muon", "Override", "ParameterGroups", "parameter_groups"]
