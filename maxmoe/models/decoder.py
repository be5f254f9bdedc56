"""Decoder-only language model with dense and Mixture-of-Experts blocks.

    logits = output(norm(blocks(embedding(tokens))))
    block:   x = x + attention(attention_norm(x)), then x = x + feed_forward(feed_forward_norm(x))

Shapes: B batch, S sequence, D hidden_size, V vocab_size, M Mixture-of-Experts layers, E experts.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe._torch import register_namedtuple
from maxmoe._torch.compile import call_uncompiled
from maxmoe.config import MoEConfig
from maxmoe.declaration import PipelineParts
from maxmoe.expert_load import MoEStats
from maxmoe.models.blocks import Block, Norm
from maxmoe.models.config import DecoderConfig
from maxmoe.nn import Declaration, MoE, ResidualStream, set_recompute
from maxmoe.ranks.token_group import LocalTokens, same_tokens_everywhere


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


class Decoder(nn.Module):
    """Causal language model with rotary attention and SwiGLU or Mixture-of-Experts layers.

    Args:
        device: device of the parameters. With "meta", nothing is allocated until `to_empty` and `reset_parameters`.
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
        self.blocks = nn.ModuleList(Block(config, moe, **options) for moe in config.moe_per_block)
        self.norm = Norm(D, config.norm_eps, **options)
        self.output = None if config.tie_embeddings else nn.Linear(D, V, bias=False, **options)
        if not self.embedding.weight.is_meta:  # it would take half of the time, without values
            self.reset_parameters()
        set_recompute(self, config.recompute)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all parameters.

        Embedding and projections are drawn from a normal distribution with standard deviation 0.02, MoE layers as by
        `MoE.reset_parameters`. Projections that write to the residual stream are divided by sqrt(2 num_layers), so that
        the variance of the stream does not grow with depth (GPT-2).
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
        blocks = [block for block in self.blocks if isinstance(block, Block)]  # not the absent blocks of other stages
        return [block.feed_forward for block in blocks if isinstance(block.feed_forward, MoE)]

    def forward(
        self,
        tokens: Tensor,
        token_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> DecoderOutput:
        """Predict the token after each position.

        Args:
            tokens: ``(B, S)``, int64; in a pipeline stage without embedding, hidden states ``(B, S, D)``.
            token_mask: ``(B, S)``, bool, False for padding. Tokens do not attend to padding, experts do not compute it,
                and its logits are undefined. Its ids may have any value.
            document_ids: ``(B, S)``, integer, for sequences packed from several documents: a token attends to earlier
                tokens with the same id. Layers whose router takes ids of documents get them.
            token_ids: ``(B, S)``, int64, in a pipeline whose routers take ids of tokens: `tokens` again, because later
                stages get hidden states in their place; None outside of one.

        Returns:
            Logits, auxiliary loss and routing statistics. In a pipeline stage without output projection, the hidden
            states are in place of the logits.

        Raises:
            ValueError: for more than `max_sequence_length` positions, a mask that is not bool, or other shapes; if
                `token_ids` are missing in a pipeline.
        """
        self._check(tokens.shape[:2], token_mask, document_ids)
        token_ids = self._token_ids(tokens, token_ids)
        if token_mask is not None:
            if not tokens.is_floating_point():
                tokens = tokens.masked_fill(~token_mask, 0)
            document_ids = torch.zeros_like(token_mask, dtype=torch.int64) if document_ids is None else document_ids
            # Padding is a document of its own and attends to itself, because a softmax over no keys would be NaN.
            document_ids = document_ids.masked_fill(~token_mask, torch.iinfo(document_ids.dtype).min)
        x = self.embedding(tokens)
        aux_losses, stats = [], []
        for block in self.blocks:
            x, aux_loss, block_stats = block(x, token_mask, document_ids, token_ids)
            if block_stats is not None:
                aux_losses.append(aux_loss)
                stats.append(block_stats)
        normed = self.norm(x)
        logits = F.linear(normed, self.embedding.weight) if self.output is None else self.output(normed)
        total = torch.stack(aux_losses).sum() if aux_losses else logits.new_zeros((), dtype=torch.float32)
        return DecoderOutput(logits, total, tuple(stats))

    @property
    def declaration(self) -> Declaration:
        """Declare the logical names of embedding and output projection, the residual stream and pipeline parts."""
        return Declaration(
            logical_names={
                "embedding.weight": ("vocab", "embed_vocab"),
                "output.weight": ("vocab", "embed_vocab"),
            },
            fsdp_unit=True,  # the forward reads the weight of the embedding outside of the embedding's forward
            unsaved_parameters=() if self.output is None else ("embedding.weight",),
            max_sequence_length=self.config.max_sequence_length,
            residual_stream=ResidualStream(self.config.hidden_size, ((None, "embedding"), ("norm", None))),
            # With tied embeddings, the last part has the embedding as well.
            pipeline_parts=PipelineParts(
                ("embedding",),
                "blocks",
                ("norm", "embedding" if self.output is None else "output"),
                absent_block_output=lambda x: (x, None, None),
            ),
        )

    def _check(self, shape: torch.Size, token_mask: Tensor | None, document_ids: Tensor | None) -> None:
        window = self.config.max_sequence_length
        if shape[-1] > window:
            raise ValueError(f"tokens must have at most {window} positions, got {shape[-1]}")
        for name, value in (("token_mask", token_mask), ("document_ids", document_ids)):
            if value is not None and value.shape != shape:
                raise ValueError(f"{name} must have the shape of tokens {tuple(shape)}, got {tuple(value.shape)}")
        if token_mask is not None and token_mask.dtype != torch.bool:
            raise ValueError(f"token_mask must be bool, got {token_mask.dtype}")
        if document_ids is not None and (document_ids.is_floating_point() or document_ids.dtype == torch.bool):
            raise ValueError(f"document_ids must be integer, got {document_ids.dtype}")

    def _token_ids(self, tokens: Tensor, token_ids: Tensor | None) -> Tensor | None:
        """Return the ids of the tokens if routers take them, of all blocks, which a stage of a pipeline lacks."""
        configs = filter(None, self.config.moe_per_block)
        if all(config.router_rule.takes_ids != "tokens" for config in configs):
            return None
        if token_ids is not None or not tokens.is_floating_point():
            return tokens if token_ids is None else token_ids
        raise ValueError(
            "token_ids must be given in a pipeline whose routers take ids of tokens, got None: call step(tokens, "
            "targets, token_ids=tokens), because stages without the embedding get hidden states"
        )

    def update_correction_bias(self, tokens_per_expert: Iterable[Tensor]) -> None:
        """Take one step of loss-free balancing in every MoE layer, given ``(M, E)`` or M tensors ``(E,)``, int64."""
        for layer, counts in zip(self.moe_layers(), tokens_per_expert, strict=True):
            layer.update_correction_bias(counts)

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, num_tokens: int, *, temperature: float = 1.0, top_k: int | None = None
    ) -> Tensor:
        """Generate tokens by sampling, each from the last `max_sequence_length` tokens.

        Up to this length, keys and values of earlier tokens are kept, so that a call computes new tokens only. Beyond
        it, and with a `capacity_factor`, a `buffer_factor` that drops slots or a router of documents, each call
        computes all tokens.

        On a mesh, all ranks must call `generate` with the same tokens and seeds.

        Args:
            tokens: ``(B, S)``, int64, prompt with S >= 1.
            num_tokens: number of tokens to append.
            temperature: divisor of the logits; 0 for greedy decoding.
            top_k: number of most likely tokens to sample from; None for all tokens.

        Returns:
            ``(B, S + num_tokens)``, int64, prompt and generated tokens.

        Raises:
            ValueError: for an empty prompt or a negative temperature.
        """
        if tokens.shape[-1] == 0 or temperature < 0:
            raise ValueError(f"need tokens and temperature >= 0, got {[*tokens.shape]}, {temperature}")
        window, length = self.config.max_sequence_length, tokens.shape[1] + num_tokens

        def extended(inputs: Tensor) -> Tensor:
            # Compiled code is made for each number of earlier tokens, up to a limit, after which training has none.
            logits = call_uncompiled(self, inputs).logits
            return torch.cat((tokens, _sample(logits[:, -1].float(), temperature, top_k)), dim=-1)

        # Until the window moves, keys and values of the earlier tokens are kept. When it moves, the first token is no
        # longer there for the others, whose keys and values change in all layers but the first. A layer that computes
        # something else for a token because of later ones computes all of them again.
        configs = [layer.config for layer in self.moe_layers()]
        if not any(_depends_on_later_tokens(config) for config in configs):
            with same_tokens_everywhere(self, lambda: ContinuedSequences(min(window, length))):
                num_computed = 0
                while tokens.shape[1] < length and tokens.shape[1] <= window:
                    num_computed, tokens = tokens.shape[1], extended(tokens[:, num_computed:])
        with same_tokens_everywhere(self):
            while tokens.shape[1] < length:
                tokens = extended(tokens[:, -window:])
        return tokens


def _depends_on_later_tokens(config: MoEConfig) -> bool:
    """Return whether later tokens of a sequence change what a layer computes for a token."""
    return config.may_drop or config.router_rule.takes_ids == "documents"


def _sample(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Draw a token ``(B, 1)`` of each sequence, given the logits ``(B, V)``; the most likely one for temperature 0."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    values, candidates = logits.topk(top_k or logits.shape[-1])
    return candidates.gather(1, torch.multinomial((values / temperature).softmax(-1), 1))


class ContinuedSequences(LocalTokens):
    """Token group of a module that is called with one part of its sequences after the other, in a single process.

    `all_gather_sequence` returns a part after the parts of all earlier calls, so that attention has a cache of keys and
    values. A module gathers the same tensors, in the same order, after asking for the first position in every call.

    Args:
        max_length: largest length of the sequences.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length, self._length, self._num_gathered = max_length, 0, 0
        self._gathered: list[Tensor] = []

    def first_position(self, length: int) -> int:
        """Return the number of tokens of all earlier calls."""
        start, self._num_gathered = self._length, 0
        self._length += length
        return start

    def all_gather_sequence(self, part: Tensor, dim: int) -> Tensor:
        """Return the sequences so far."""
        if self._num_gathered == len(self._gathered):
            shape = (*part.shape[:dim], self._max_length, *part.shape[dim + 1 :])
            self._gathered.append(part.new_empty(shape))
        whole = self._gathered[self._num_gathered]
        self._num_gathered += 1
        whole.narrow(dim, self._length - part.shape[dim], part.shape[dim]).copy_(part)
        return whole.narrow(dim, 0, self._length)
