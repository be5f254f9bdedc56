"""RMSNorm of a decoder."""

import torch
from torch import nn

from maxmoe.nn import TOKEN_DIMS, Checkpointed, Declaration, SavedTensor


class Norm(Checkpointed, nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the hidden dim."""

    recompute_names = ("norms",)

    @property
    def declaration(self) -> Declaration:
        """Declare logical names and saved tensors."""
        return Declaration(logical_names={"weight": ("norm",)}, saved_tensors=self._saved_tensors)

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        """Describe the input, the normalized input and the scale factors, all in float32 or wider."""
        dtype, width = self.weight.dtype, len(self.weight)
        wide = torch.promote_types(dtype, torch.float32)
        gathered = (*TOKEN_DIMS, None)  # the input is all-gathered if the residual stream is sharded
        shapes = {"wide_input": width, "normalized": width, "factors": 1}
        saved = {name: SavedTensor((batch, length, size), gathered, wide) for name, size in shapes.items()}
        if self.is_recomputed:
            if wide == dtype:  # then the wide input is the argument
                del saved["wide_input"]
            saved["argument"] = SavedTensor((batch, length, width), (*TOKEN_DIMS, "activation_embed"))
        return self.mark_saved(saved, "argument")
