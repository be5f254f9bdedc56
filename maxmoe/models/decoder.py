"""A decoder-only language model with dense and Mixture-of-Experts blocks.

    logits = output(norm(blocks(embedding(tokens))))
    block:   x = x + attention(attention_norm(x)), then x = x + feed_forward(feed_forward_norm(x))

Shapes: B batch, S sequence, D hidden_size, V vocab_size, H heads, G key-value heads, C head_dim,
M Mixture-of-Experts layers, E experts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maxmoe.config import MoEConfig
from maxmoe.nn import MoE, MoEStats, keep_routing


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a `Decoder`.

    Args:
        vocab_size: V.
        hidden_size: D, width of the residual stream.
        num_layers: blocks, dense and Mixture-of-Experts together.
        num_heads: H, query heads.
        num_key_value_heads: G, each shared by H / G query heads; None for H.
        head_dim: C, even; None for D / H.
        intermediate_size: width inside the dense blocks, needed where there are any.
        moe: the layer of the Mixture-of-Experts blocks, None for a dense model.
        num_dense_layers: the first blocks, which stay dense although `moe` is given.
        max_sequence_length: longest input, and the window of `Decoder.generate`.
        rope_theta: base of the rotary frequencies.
        norm_eps: of every RMSNorm.
        tie_embeddings: the output projection is the embedding.
        checkpoint_blocks: keep only the input of each block for the backward, recompute the rest.

    Raises:
        ValueError: for values that contradict each other; the message names both.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    moe: MoEConfig | None = None
    num_dense_layers: int = 0
    max_sequence_length: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    checkpoint_blocks: bool = False

    def __post_init__(self) -> None:
        required = ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_sequence_length")
        for name in (*required, "num_key_value_heads", "head_dim", "intermediate_size"):
            value = getattr(self, name)
            derived = value is None and name not in required
            if not derived and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        self._check_heads()
        self._check_blocks()

    def _check_heads(self) -> None:
        if self.num_key_value_heads is not None and self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide num_heads ({self.num_heads})"
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must divide hidden_size ({self.hidden_size}) without head_dim"
            )
        head_dim = self.head_dim or self.hidden_size // self.num_heads
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, got {head_dim}")

    def _check_blocks(self) -> None:
        if self.moe is not None and self.moe.hidden_size != self.hidden_size:
            raise ValueError(f"moe.hidden_size ({self.moe.hidden_size}) must equal hidden_size ({self.hidden_size})")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"num_dense_layers ({self.num_dense_layers}) must be from 0 to num_layers ({self.num_layers})"
            )
        if self.intermediate_size is None and (self.moe is None or self.num_dense_layers > 0):
            raise ValueError("intermediate_size must be given where there are dense blocks, got None")


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


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x ``(B, H, S, C)``: (x[c], x[c + C/2]) at s turns by s * theta^(-2c / C).

    Source: Su et al. 2021, RoFormer, in the half-split order of GPT-NeoX and Llama.
    """
    S, C = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, C, 2, dtype=torch.float32, device=x.device) / C)
    angles = torch.outer(torch.arange(S, dtype=torch.float32, device=x.device), frequencies)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads; `options` are device and dtype."""

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        super().__init__()
        D, H = config.hidden_size, config.num_heads
        G, C = config.num_key_value_heads or H, config.head_dim or D // H
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
        queries, keys = rotate(queries, self.rope_theta), rotate(keys, self.rope_theta)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return output


class FeedForward(nn.Module):
    """SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)); `options` are device and dtype."""

    def __init__(self, hidden_size: int, intermediate_size: int, **options: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token by itself: ``(B, S, D)`` to ``(B, S, D)``."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Block(nn.Module):
    """Attention, then a dense or a Mixture-of-Experts layer; `options` are device and dtype."""

    def __init__(self, config: DecoderConfig, *, dense: bool, **options: Any) -> None:
        super().__init__()
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

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
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
