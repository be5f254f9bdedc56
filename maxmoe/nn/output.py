"""What a layer returns."""

from typing import NamedTuple

from torch import Tensor

from maxmoe._torch import register_namedtuple
from maxmoe.expert_load.stats import MoEStats


class MoEOutput(NamedTuple):
    """Output of a `MoE` layer.

    Attributes:
        hidden_states: ``(..., S, D)``, shape and dtype of the input.
        aux_loss: ``()``, float32 or wider, sum of the weighted auxiliary losses, to be added to the training loss. On a
            mesh, it is over the tokens of all ranks; without gradients over this rank's tokens, without communication.
        stats: routing statistics of the call, over the same tokens.
    """

    hidden_states: Tensor
    aux_loss: Tensor
    stats: MoEStats


class StatefulMoEOutput(NamedTuple):
    """Output of a `MoE` layer whose router has a state for the next layer, as in ZAYA.

    Attributes:
        hidden_states: as in `MoEOutput`.
        aux_loss: as in `MoEOutput`.
        stats: as in `MoEOutput`.
        router_state: ``(..., S, R)``, float32 or wider, argument of the next layer.
    """

    hidden_states: Tensor
    aux_loss: Tensor
    stats: MoEStats
    router_state: Tensor


# torch.export.save requires a serialized type name.
register_namedtuple(MoEOutput, "maxmoe.MoEOutput")
register_namedtuple(StatefulMoEOutput, "maxmoe.StatefulMoEOutput")
