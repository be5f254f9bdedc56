"""Blocks of a decoder: attention with rotary position embedding, dense feed-forward layer, RMSNorm.

Shapes: B batch, S sequence, N whole sequence, D hidden_size, H heads, G key-value heads, C head_dim.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe.config import MoEConfig
from maxmoe.expert_load import MoEStats
from maxmoe.models.config import DecoderConfig
from maxmoe.nn import (
    Checkpointed,
    Declaration,
    LocalTokens,
    MoE,
    ResidualStream,
    TokenGroupAttribute,
    keep_routing,
)
from maxmoe.nn.rms_norm import rms_norm


class Block(Checkpointed):
    """Attention, then a Mixture-of-Experts layer, or a dense one; `options` are device and dtype of the parameters."""

    recompute_names = ("blocks",)
    context_fn = staticmethod(keep_routing)

    def __init__(self, config: DecoderConfig, moe: MoEConfig | None, **options: Any) -> None:
        super().__init__()
        D = config.hidden_size
        self.attention_norm = Norm(D, config.norm_eps, **options)
        self.attention = Attention(config, **options)
        self.feed_forward_norm = Norm(D, config.norm_eps, **options)
        self.feed_forward: FeedForward | MoE
        if moe is None:
            assert config.intermediate_size is not None
            self.feed_forward = FeedForward(D, config.intermediate_size, **options)
        else:
            self.feed_forward = MoE(moe, **options)

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, MoEStats | None]:
        """Return x ``(B, S, D)`` after the block, and auxiliary loss and statistics of its MoE layer if it has one."""
        x = x + self.attention(self.attention_norm(x), document_ids)
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, FeedForward):
            return x + self.feed_forward(normed), None, None
        ids = {}
        match self.feed_forward.config.router_rule.takes_ids:
            case "tokens":
                ids["router_inputs"] = token_ids
            case "documents":  # without ids, a sequence is a document
                is_one = document_ids is None
                ids["router_inputs"] = x.new_zeros(x.shape[:2], dtype=torch.int64) if is_one else document_ids
        update = self.feed_forward(normed, token_mask, **ids)
        return x + update.hidden_states, update.aux_loss, update.stats

    @property
    def declaration(self) -> Declaration:
        """Declare the block as a FSDP unit, with its residual stream."""
        return Declaration(
            fsdp_unit=True,
            residual_stream=ResidualStream(
                len(self.attention_norm.weight),
                (("attention_norm", "attention"), ("feed_forward_norm", "feed_forward")),
            ),
        )


class Attention(Checkpointed):
    """Causal self-attention with grouped query heads; `options` are device and dtype of the parameters."""

    recompute_names = ("attention",)
    token_group = TokenGroupAttribute()

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        super().__init__()
        D, H = config.hidden_size, config.num_heads
        G, C = config.num_key_value_heads or H, config.head_dim or D // H
        self.num_heads, self.num_key_value_heads, self.head_dim = H, G, C
        self.token_group = LocalTokens()
        self.rope_theta = config.rope_theta
        self.q_proj = nn.Linear(D, H * C, bias=False, **options)
        self.k_proj = nn.Linear(D, G * C, bias=False, **options)
        self.v_proj = nn.Linear(D, G * C, bias=False, **options)
        self.o_proj = nn.Linear(H * C, D, bias=False, **options)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Compute attention ``(B, S, D)`` of x ``(B, S, D)`` within the documents given by ids ``(B, S)``."""
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        tokens = self.token_group
        start = tokens.first_position(x.shape[1])
        by = rotation(queries, self.rope_theta, start)
        queries, keys = rotate(queries, by), rotate(keys, by)
        # If sequences are sharded, this rank has a shard of the queries, and gathers all keys and values.
        keys, values = (tokens.all_gather_sequence(part, dim=2) for part in (keys, values))
        documents = None
        if document_ids is not None:
            documents = (document_ids, tokens.all_gather_sequence(document_ids, dim=1))
        mixed = causal_attention(queries, keys, values, start, documents)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return output

    @property
    def declaration(self) -> Declaration:
        """Declare logical names and tensor-parallel heads."""
        return Declaration(
            logical_names={
                "q_proj.weight": ("q_heads", "embed_attn"),
                "k_proj.weight": ("kv_heads", "embed_attn"),
                "v_proj.weight": ("kv_heads", "embed_attn"),
                "o_proj.weight": ("embed_attn", "q_heads"),
            },
            tensor_parallel_dims={"q_heads": self.num_heads, "kv_heads": self.num_key_value_heads},
        )


class Rotation(NamedTuple):
    """Factors of the rotary embedding of a channel and of the other channel of its pair: each ``(S, C)``."""

    own: Tensor
    other: Tensor


def rotation(x: Tensor, theta: float, start: int = 0) -> Rotation:
    """Return the rotation of x ``(B, H, S, C)``, of (x[c], x[c + C/2]) by (start + s) * theta^(-2c / C).

    Source: Su et al. 2021, RoFormer, in the half-split order of GPT-NeoX and Llama.
    """
    (S, C), wide = x.shape[-2:], torch.promote_types(x.dtype, torch.float32)
    frequencies = theta ** (-torch.arange(0, C, 2, dtype=wide, device=x.device) / C)
    angles = torch.outer(torch.arange(start, start + S, dtype=wide, device=x.device), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Apply the rotary embedding to x ``(B, H, S, C)``."""
    wide = x.to(by.own.dtype)
    return torch.addcmul(wide * by.own, wide.roll(x.shape[-1] // 2, dims=-1), by.other).to(x.dtype)


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, start: int, documents: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Compute causal attention of queries ``(B, H, S, C)`` to keys and values ``(B, G, N, C)`` of the same document.

    Queries begin at the position `start`, keys at 0. `documents` has the ids of the documents of the queries ``(B, S)``
    and of the keys ``(B, N)``.
    """
    is_last = queries.shape[2] == 1 and start + 1 == keys.shape[2]  # attends to all keys
    if documents is None and (is_last or queries.shape[2] == keys.shape[2]):
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=not is_last, enable_gqa=True)
    positions = torch.arange(keys.shape[2], device=keys.device)
    mask = positions <= positions[start : start + queries.shape[2], None]
    if documents is not None:
        of_queries, of_keys = documents
        mask = (mask & (of_queries.unsqueeze(2) == of_keys.unsqueeze(1))).unsqueeze(1)
    return F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)


class FeedForward(Checkpointed):
    """SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)); `options` are device and dtype of the parameters."""

    recompute_names = ("feed_forward",)

    def __init__(self, hidden_size: int, intermediate_size: int, **options: Any) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output ``(B, S, D)`` for x ``(B, S, D)``."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output

    @property
    def declaration(self) -> Declaration:
        """Declare logical names and the tensor-parallel dim."""
        return Declaration(
            logical_names={
                "gate_proj.weight": ("mlp", "embed"),
                "up_proj.weight": ("mlp", "embed"),
                "down_proj.weight": ("embed", "mlp"),
            },
            tensor_parallel_dims={"mlp": self.intermediate_size},
        )


class Norm(Checkpointed, nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the hidden dim."""

    recompute_names = ("norms",)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x ``(..., D)``."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)

    @property
    def declaration(self) -> Declaration:
        """Declare the logical name."""
        return Declaration(logical_names={"weight": ("norm",)})
