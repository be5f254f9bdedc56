"""Models as users write them, without declarations, and the arguments of their forward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maxmoe import MoEConfig, MoEFeedForward

MOE = MoEConfig(hidden_size=32, intermediate_size=48, num_experts=4, top_k=2, load_balance_loss_weight=0.01)
VOCABULARY = 61


class UserModel(NamedTuple):
    """A model, the arguments of its forward for a number of sequences and their length; unusual if not guessed."""

    model: nn.Module
    arguments: Callable[[int, int], tuple[Tensor, ...]]
    are_unusual: bool = False


def ids(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randint(VOCABULARY, (batch, length)),)


def hidden_states(batch: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, length, 32),)


class Attention(nn.Module):
    """Causal attention, its scores written out as products or computed by torch."""

    def __init__(self, *, is_written_out: bool) -> None:
        super().__init__()
        self.queries_keys_values, self.output = nn.Linear(32, 96), nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril(), persistent=False)
        self.is_written_out = is_written_out

    def forward(self, x: Tensor) -> Tensor:
        heads = self.queries_keys_values(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads
        if self.is_written_out:
            scores = (queries @ keys.mT / 8**0.5).masked_fill(~self.mask[: x.shape[1], : x.shape[1]], -torch.inf)
            values = self.dropout(scores.softmax(-1)) @ values
        else:
            values = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = self.output(values.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.mixer = nn.LayerNorm(32), mixer
        self.norm_2, self.feed_forward = nn.LayerNorm(32), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))  # type: ignore[no-any-return]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1))


class LanguageModel(nn.Module):
    """Takes token ids and optional targets; any blocks; the output layer shares the weight of the embedding if tied."""

    def __init__(self, *blocks: nn.Module, is_tied: bool = False, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(32)
        self.output = nn.Linear(32, VOCABULARY, bias=False)
        self.is_checkpointed = is_checkpointed
        if is_tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Recurrent(nn.Module):
    """A recurrence in a loop of Python, and torch's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.layer, self.moe = nn.GRUCell(32, 32), nn.GRU(32, 32, batch_first=True), MoEFeedForward(MOE)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(len(x), 32), []
        for token in x.unbind(1):
            state = self.cell(token, state)
            states.append(state)
        output, _ = self.layer(torch.stack(states, 1))
        return self.moe(output)  # type: ignore[no-any-return]


class EncoderDecoder(nn.Module):
    """A model with two keyword arguments of different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)

    def forward(self, frames: Tensor, tokens: Tensor) -> Tensor:
        return self.transformer(frames, self.embedding(tokens))  # type: ignore[no-any-return]


def of_transformers(name: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**sizes, num_key_value_heads=2, intermediate_size=80, **options)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), MoEFeedForward(MOE))


def attention_of_torch() -> nn.Module:
    return Attention(is_written_out=False)


LENGTH = 24
MODELS: dict[str, Callable[[], UserModel]] = {
    "GPT, attention written out": lambda: UserModel(
        LanguageModel(*(Block(Attention(is_written_out=True), dense()) for _ in range(3))), ids
    ),
    "nn.TransformerEncoder": lambda: UserModel(encoder(), hidden_states),
    "recurrent": lambda: UserModel(Recurrent(), hidden_states),
    "tied embeddings, MoE in each second block": lambda: UserModel(
        LanguageModel(*(Block(attention_of_torch(), feed) for feed in (dense(), MoEFeedForward(MOE))), is_tied=True),
        ids,
    ),
    "checkpointed blocks": lambda: UserModel(
        LanguageModel(*(Block(attention_of_torch(), dense()) for _ in range(3)), is_checkpointed=True), ids
    ),
    "encoder and decoder": lambda: UserModel(
        EncoderDecoder(),
        lambda batch, length: (torch.randn(batch, 2 * length, 32), *ids(batch, length)),
        are_unusual=True,
    ),
    "Qwen3 of transformers": lambda: UserModel(of_transformers("Qwen3", head_dim=8), ids),
}
