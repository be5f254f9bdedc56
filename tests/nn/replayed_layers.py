"""Records of routing, and layers that select other experts."""

import copy

import torch
from torch import Tensor

import maxmoe
from maxmoe import MoE
from maxmoe.nn import RoutingRecord


def recorded(model: torch.nn.Module, *arguments: Tensor) -> RoutingRecord:
    with maxmoe.record_routing(model) as record:
        model(*arguments)
    return record


def moved(layer: MoE) -> MoE:
    """A copy of the layer with other parameters, which selects other experts."""
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter))
    return layer
