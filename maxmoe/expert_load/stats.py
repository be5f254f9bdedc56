"""Routing statistics of one call of a layer."""

from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe._torch import register_namedtuple


class MoEStats(NamedTuple):
    """Routing statistics of one call of a layer, as tensors, so that the host does not wait for the device.

    Attributes:
        tokens_per_expert: ``(E,)``, int64, number of slots routed to each expert that the router selects from, dropped
            slots included.
        dropped: ``()``, int64, number of slots dropped by capacity_factor or buffer_factor. Without gradients, on
            a mesh, those that this rank dropped, which may be slots of other ranks' tokens.
        router_entropy: ``()``, mean entropy of the normalised scores in nats, at most log(E).
    """

    tokens_per_expert: Tensor
    dropped: Tensor
    router_entropy: Tensor

    @property
    def load_max_over_mean(self) -> Tensor:
        """Largest load of an expert divided by the mean load: 1 if balanced, at most E / K."""
        load = self.tokens_per_expert.to(torch.float32)
        return load.max() / load.mean().clamp_min(1e-20)

    @property
    def dead_expert_fraction(self) -> Tensor:
        """Fraction of the experts that received no token."""
        return (self.tokens_per_expert == 0).to(torch.float32).mean()

    def __repr__(self) -> str:
        shown = (*self._fields, "load_max_over_mean", "dead_expert_fraction")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


class BoundedMoEStats(NamedTuple):
    """As `MoEStats`, of a layer with a buffer whose overflow is computed in chunks, unless its rows always fit.

    Attributes:
        required_buffer_factor: ``()``, float64, least `buffer_factor` that would not have overflowed, on the rank with
            the most rows; over a step, the largest of all calls.
        overflowed: ``()``, int64, whether the rows were computed in several chunks, 0 or 1; over a step, the number of
            such calls.
    """

    tokens_per_expert: Tensor
    dropped: Tensor
    router_entropy: Tensor
    required_buffer_factor: Tensor
    overflowed: Tensor

    @property
    def load_max_over_mean(self) -> Tensor:
        """Largest load of an expert divided by the mean load: 1 if balanced, at most E / K."""
        return MoEStats(*self[:3]).load_max_over_mean

    @property
    def dead_expert_fraction(self) -> Tensor:
        """Fraction of the experts that received no token."""
        return MoEStats(*self[:3]).dead_expert_fraction


# torch.export.save requires a serialized type name.
register_namedtuple(MoEStats, "maxmoe.MoEStats")
register_namedtuple(BoundedMoEStats, "maxmoe.expert_load.BoundedMoEStats")
