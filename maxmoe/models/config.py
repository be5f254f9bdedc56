"""Configuration of a `Decoder`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maxmoe.checks.fields import check_bool, check_int, check_number, refuse_unknown_fields
from maxmoe.config import MoEConfig
from maxmoe.families.family import PublishedModel


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a `Decoder`.

    Args:
        vocab_size: V, number of token ids.
        hidden_size: D, width of the residual stream.
        num_layers: number of blocks, dense and Mixture-of-Experts.
        num_heads: H, number of query heads.
        num_key_value_heads: G, number of key-value heads, each shared by H / G query heads; None for H.
        head_dim: C, width of a head, even; None for D / H.
        intermediate_size: width inside the dense feed-forward layers; required if there are dense blocks.
        moe: config of all Mixture-of-Experts layers, or a sequence of configs, one per layer; None for a dense model.
        num_dense_layers: number of blocks at the beginning that are dense although `moe` is given.
        max_sequence_length: largest number of positions of an input, and the window of `Decoder.generate`.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the RMSNorms.
        tie_embeddings: use the embedding as the output projection.
        recompute: names of the parts that are recomputed in the backward, such as "experts" and "attention"; see
            `maxmoe.set_recompute`.

    Raises:
        TypeError: for an unknown keyword, with the most similar fields.
        ValueError: for a value of another type or out of range, and for values that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    moe: MoEConfig | Sequence[MoEConfig] | None = None
    num_dense_layers: int = 0
    max_sequence_length: int = 4096
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    recompute: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_sequence_length"):
            check_int(name, getattr(self, name), at_least=1)
        for name in ("num_key_value_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        check_int("num_dense_layers", self.num_dense_layers, at_least=0)
        check_number("rope_theta", self.rope_theta, above=0)
        check_number("norm_eps", self.norm_eps, at_least=0)
        check_bool("tie_embeddings", self.tie_embeddings)
        if not isinstance(self.recompute, tuple) or not all(isinstance(name, str) for name in self.recompute):
            raise ValueError(f"recompute must be a tuple of names, got {self.recompute!r}")
        self._check_heads()
        self._check_blocks()
        self._check_moe()

    @classmethod
    def of_published(cls, model: PublishedModel, **fields: Any) -> "DecoderConfig":
        """Return the config of a decoder with the sizes of a published model; `fields` replace them."""
        moe = model.layer()
        return cls(**{**model.sizes, "hidden_size": moe.hidden_size, "moe": moe, **fields})

    @property
    def moe_per_block(self) -> tuple[MoEConfig | None, ...]:
        """Config of the Mixture-of-Experts layer of each block; None for a dense block."""
        num_dense_layers = self.num_layers if self.moe is None else self.num_dense_layers
        moe = self.moe if isinstance(self.moe, Sequence) else (self.moe,) * (self.num_layers - num_dense_layers)
        return (None,) * num_dense_layers + tuple(moe)

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
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers ({self.num_dense_layers}) must not exceed num_layers ({self.num_layers})"
            )
        if self.intermediate_size is None and (self.moe is None or self.num_dense_layers > 0):
            raise ValueError("intermediate_size must be given where there are dense blocks, got None")

    def _check_moe(self) -> None:
        if isinstance(self.moe, Sequence):
            object.__setattr__(self, "moe", tuple(self.moe))  # so that the config can be hashed
            num_layers = self.num_layers - self.num_dense_layers
            if len(self.moe) != num_layers:
                raise ValueError(
                    f"moe must have a config for each of the {num_layers} layers that are not dense, "
                    f"got {len(self.moe)}"
                )
            named = {f"moe[{layer}]": config for layer, config in enumerate(self.moe)}
        else:
            named = {} if self.moe is None else {"moe": self.moe}
        for name, config in named.items():
            if not isinstance(config, MoEConfig):
                raise ValueError(f"{name} must be a MoEConfig, got {config!r}")
            if config.hidden_size != self.hidden_size:
                raise ValueError(
                    f"{name}.hidden_size ({config.hidden_size}) must equal hidden_size ({self.hidden_size})"
                )
            if config.router_rule.state_size is not None:
                raise ValueError(
                    f"{name}.router must have no state, because the blocks pass no state of a router on, got "
                    f"{config.router}"
                )
