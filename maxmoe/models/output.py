"""Output of a decoder. Shapes: B batch, S sequence, V vocab_size, M Mixture-of-Experts layers, E experts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe._torch import register_namedtuple
from maxmoe.deferred import Deferred, deferred
from maxmoe.load import MoEStats
from maxmoe.nn import MoEOutput


class DecoderOutput(NamedTuple):
    """Output of a `Decoder`.

    Args:
        logits: ``(B, S, V)``, logits of the token after each position.
        aux_loss: ``()``, sum of the weighted auxiliary losses over the layers.
        stats: routing statistics of each Mixture-of-Experts layer.
    """

    logits: Tensor
    aux_loss: Tensor
    stats: tuple[MoEStats, ...]

    @classmethod
    def of_layers(cls, logits: Tensor, outputs: Sequence[MoEOutput]) -> "DecoderOutput":
        """Return the output of a model, given those of its Mixture-of-Experts layers."""

        def sums() -> tuple[Tensor, tuple[MoEStats, ...]]:
            if not outputs:
                return logits.new_zeros((), dtype=torch.float32), ()
            return torch.stack([output.aux_loss for output in outputs]).sum(), tuple(output.stats for output in outputs)

        if outputs and all(isinstance(output, Deferred) for output in outputs):
            return deferred(cls, logits, compute=sums)
        return cls(logits, *sums())

    @property
    def tokens_per_expert(self) -> Tensor:
        """Number of routed slots ``(M, E)``, int64; the input of `update_correction_bias`.

        Raises:
            ValueError: if the layers have different numbers of experts.
        """
        counts = [stats.tokens_per_expert for stats in self.stats]
        if len({*map(len, counts)}) > 1:
            raise ValueError(
                f"tokens_per_expert needs layers with one number of experts, got {[*map(len, counts)]}: "
                "read stats, and give update_correction_bias a list"
            )
        return torch.stack(counts)


# torch.export.save requires a serialized type name.
register_namedtuple(DecoderOutput, "maxmoe.models.DecoderOutput")
