"""Dense feed-forward layer of a decoder."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe.nn import TOKEN_DIMS, Checkpointed, Declaration, SavedTensor


class FeedForward(Checkpointed):
    """SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)); `options` are device and dtype of the parameters."""

    recompute_names = ("feed_forward",)

    def __init__(self, hidden_size: int, intermediate_size: int, **options: Any) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output ``(B, S, D)`` for x ``(B, S, D)``."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output

    @property
    def declaration(self) -> Declaration:
        """Declare logical names, the tensor-parallel dim and saved tensors."""
        return Declaration(
            logical_names={
                "gate_proj.weight": ("mlp", "embed"),
                "up_proj.weight": ("mlp", "embed"),
                "down_proj.weight": ("embed", "mlp"),
            },
            tensor_parallel_dims={"mlp": self.intermediate_size},
            saved_tensors=self._saved_tensors,
        )

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        inner = SavedTensor((batch, length, self.intermediate_size), (*TOKEN_DIMS, "activation_mlp"))
        saved = dict.fromkeys(("gate", "up", "activated_gate", "product"), inner)
        saved["input"] = SavedTensor((batch, length, self.hidden_size), (*TOKEN_DIMS, None))
        return self.mark_saved(saved, "input")
