"""Muon for matrices, stacks of matrices included, and AdamW for all other parameters; in one process or on a mesh."""

from maxmoe.optim.muon import Muon
from maxmoe.optim.newton_schulz import Matrix
from maxmoe.optim.parameter_groups import Choice, Override, ParameterGroups, parameter_groups

__all__ = ["Choice", "Matrix", "Muon", "Override", "ParameterGroups", "parameter_groups"]
