"""A decoder-only language model with dense and Mixture-of-Experts blocks.

    logits = output(norm(blocks(embedding(tokens))))
    block:   x = x + attention(attention_norm(x)), then x = x + feed_forward(feed_forward_norm(x))

Shapes: B batch, S sequence, D hidden_size, V vocab_size, H heads, G key-value heads, C head_dim,
M Mixture-of-Experts layers, E experts.
"""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maxmoe.models.config import DecoderConfig
from maxmoe.nn import LogicalNames, MoE, MoEStats, TokenLayout, WholeBatch, keep_routing


class DecoderOutput(NamedTuple):
    """What `Decoder` returns.

    Args:
        logits: ``(B, S, V)``.
        aux_loss: 0-dim, the sum over the layers; the weights of the losses are already in.
        stats: one per Mixture-of-Experts layer.
    """

    logits: Tensor
    aux_loss: Tensor
    stats: tuple[MoEStats, ...]

    @property
    def tokens_per_expert(self) -> Tensor:
        """``(M, E)`` int64: to be logged, summed over micro-batches, handed to `update_correction_bias`."""
        return torch.stack([stats.tokens_per_expert for stats in self.stats])


def rotate(x: Tensor, theta: float, start: int = 0) -> Tensor:
    """Rotary embedding of x ``(B, H, S, C)``: (x[c], x[c + C/2]) at s turns by (start + s) * theta^(-2c / C).

    Source: Su et al. 2021, RoFormer, in the half-split order of GPT-NeoX and Llama.
    """
    S, C = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, C, 2, dtype=torch.float32, device=x.device) / C)
    angles = torch.outer(torch.arange(start, start + S, dtype=torch.float32, device=x.device), frequencies)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Let queries ``(B, H, S, C)`` from position `start` on see the keys ``(B, G, N, C)`` up to their own."""
    is_whole = queries.shape[2] == keys.shape[2]
    mask = None
    if not is_whole:
        positions = torch.arange(keys.shape[2], device=keys.device)
        mask = positions <= positions[start : start + queries.shape[2], None]
    return F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_whole, enable_gqa=True)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads; `options` are device and dtype."""

    logical_names: ClassVar[LogicalNames] = {
        "q_proj.weight": ("q_heads", "embed"),
        "k_proj.weight": ("kv_heads", "embed"),
        "v_proj.weight": ("kv_heads", "embed"),
        "o_proj.weight": ("embed", "q_heads"),
    }

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        super().__init__()
        D, H = config.hidden_size, config.num_heads
        G, C = config.num_key_value_heads or H, config.head_dim or D // H
        self.parallel_dims = {"q_heads": H, "kv_heads": G}
        self.token_layout: TokenLayout = WholeBatch()
        self.head_dim = C
        self.rope_theta = config.rope_theta
        self.q_proj = nn.Linear(D, H * C, bias=False, **options)
        self.k_proj = nn.Linear(D, G * C, bias=False, **options)
        self.v_proj = nn.Linear(D, G * C, bias=False, **options)
        self.o_proj = nn.Linear(H * C, D, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions up to each one: ``(B, S, D)`` to ``(B, S, D)``."""
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        start = self.token_layout.first_position(x.shape[1])
        queries, keys = rotate(queries, self.rope_theta, start), rotate(keys, self.rope_theta, start)
        keys, values = (self.token_layout.whole_sequence(part, dim=2) for part in (keys, values))
        mixed = causal_attention(queries, keys, values, start)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return output


class FeedForward(nn.Module):
    """SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)); `options` are device and dtype."""

    logical_names: ClassVar[LogicalNames] = {
        "gate_proj.weight": ("mlp", "embed"),
        "up_proj.weight": ("mlp", "embed"),
        "down_proj.weight": ("embed", "mlp"),
    }

    def __init__(self, hidden_size: int, intermediate_size: int, **options: Any) -> None:
        super().__init__()
        self.parallel_dims = {"mlp": intermediate_size}
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token by itself: ``(B, S, D)`` to ``(B, S, D)``."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Block(nn.Module):
    """Attention, then a dense or a Mixture-of-Experts layer; `options` are device and dtype."""

    logical_names: ClassVar[LogicalNames] = {"attention_norm.weight": ("norm",), "feed_forward_norm.weight": ("norm",)}

    def __init__(self, config: DecoderConfig, *, dense: bool, **options: Any) -> None:
        super().__init__()
        self.parallel_dims: dict[str, int] = {}
        D = config.hidden_size
        self.attention_norm = nn.RMSNorm(D, config.norm_eps, **options)
        self.attention = Attention(config, **options)
        self.feed_forward_norm = nn.RMSNorm(D, config.norm_eps, **options)
        self.feed_forward: FeedForward | MoE
        if dense or config.moe is None:
            assert config.intermediate_size is not None
            self.feed_forward = FeedForward(D, config.intermediate_size, **options)
        else:
            self.feed_forward = MoE(config.moe, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None, MoEStats | None]:
        """Return x ``(B, S, D)`` after the block, then auxiliary loss and statistics of a MoE layer."""
        x = x + self.attention(self.attention_norm(x))
        update = self.feed_forward(self.feed_forward_norm(x))
        if isinstance(update, Tensor):
            return x + update, None, None
        return x + update.hidden_states, update.aux_loss, update.stats


class Decoder(nn.Module):
    """A causal language model: rotary attention and SwiGLU or Mixture-of-Experts blocks.

    Args:
        config: the sizes.
        device: of the parameters; "meta" allocates nothing, then `to_empty` and `reset_parameters`.
        dtype: of the parameters.
    """

    logical_names: ClassVar[LogicalNames] = {
        "embedding.weight": ("vocab", "embed_vocab"),
        "norm.weight": ("norm",),
        "output.weight": ("vocab", "embed_vocab"),
    }

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel_dims: dict[str, int] = {}
        V, D = config.vocab_size, config.hidden_size
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(V, D, **options)
        self.blocks = nn.ModuleList(
            Block(config, dense=layer < config.num_dense_layers, **options) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(D, config.norm_eps, **options)
        self.output = None if config.tie_embeddings else nn.Linear(D, V, bias=False, **options)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every parameter anew.

        Embedding and projections: normal with deviation 0.02; routers and experts: as `MoE` does. What
        writes to the residual stream is divided by sqrt(2 num_layers), for depth not to enlarge it (GPT-2).
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        for layer in self.moe_layers():
            layer.reset_parameters()
        for name, parameter in self.named_parameters():
            if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
                parameter.div_((2 * self.config.num_layers) ** 0.5)

    def moe_layers(self) -> list[MoE]:
        """Return the Mixture-of-Experts layers in the order of `DecoderOutput.stats`."""
        return [block.feed_forward for block in self.blocks if isinstance(block.feed_forward, MoE)]

    def forward(self, tokens: Tensor) -> DecoderOutput:
        """Predict the token after each position of ``tokens`` (B, S) int64."""
        window = self.config.max_sequence_length
        if tokens.shape[-1] > window:
            raise ValueError(f"tokens must have at most {window} positions, got {tokens.shape[-1]}")
        x = self.embedding(tokens)
        aux_losses, stats = [], []
        recompute = self.config.checkpoint_blocks and torch.is_grad_enabled()
        recomputed = partial(checkpoint, use_reentrant=False, context_fn=keep_routing)
        for block in self.blocks:
            x, aux_loss, block_stats = recomputed(block, x) if recompute else block(x)
            if block_stats is not None:
                aux_losses.append(aux_loss)
                stats.append(block_stats)
        output = self.embedding if self.output is None else self.output
        logits = F.linear(self.norm(x), output.weight)
        total = torch.stack(aux_losses).sum() if aux_losses else logits.new_zeros((), dtype=torch.float32)
        return DecoderOutput(logits, total, tuple(stats))

    def update_correction_bias(self, tokens_per_expert: Tensor) -> None:
        """Take one step of loss-free balancing in every MoE layer, given counts ``(M, E)``."""
        for layer, counts in zip(self.moe_layers(), tokens_per_expert, strict=True):
            layer.update_correction_bias(counts)

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, num_tokens: int, *, temperature: float = 1.0, top_k: int | None = None
    ) -> Tensor:
        """Continue sequences by sampling, each token from the last `max_sequence_length` ones.

        Args:
            tokens: ``(B, S)`` int64, S >= 1.
            num_tokens: how many to append.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: sample among this many most likely tokens only, None for all.

        Returns:
            ``(B, S + num_tokens)`` int64.

        Raises:
            ValueError: for an empty prompt or a negative temperature.
        """
        if tokens.shape[-1] == 0 or temperature < 0:
            raise ValueError(f"need tokens and temperature >= 0, got {[*tokens.shape]}, {temperature}")
        for _ in range(num_tokens):
            logits = self(tokens[:, -self.config.max_sequence_length :]).logits[:, -1].float()
            values, candidates = logits.topk(top_k or logits.shape[-1])
            if temperature > 0:
                choice = torch.multinomial((values / temperature).softmax(-1), 1)
            else:
                choice = torch.zeros_like(candidates[:, :1])
            tokens = torch.cat((tokens, candidates.gather(1, choice)), dim=-1)
        return tokens
