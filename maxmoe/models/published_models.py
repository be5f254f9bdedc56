"""Sizes of the published models of `maxmoe.presets`, for planning each as a `Decoder`."""

from collections.abc import Callable
from dataclasses import dataclass

from maxmoe import presets
from maxmoe.config import MoEConfig
from maxmoe.models.config import DecoderConfig

_LATENT = "plain attention with as many heads of 128 instead of latent attention"
_NORMED_HEADS = "no norms of queries and keys"


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """Sizes of a published model, as a `Decoder` has them.

    Args:
        name: name of the model.
        layer: preset of its Mixture-of-Experts layers.
        num_layers: number of layers, including dense layers, without multi-token prediction layers.
        num_heads: number of query heads.
        num_key_value_heads: number of key-value heads.
        head_dim: width of a head.
        vocab_size: number of token ids.
        num_dense_layers: number of dense layers.
        intermediate_size: width inside the dense layers; None without dense layers.
        differs: differences of the `Decoder` from the published model.
    """

    name: str
    layer: Callable[..., MoEConfig]
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int
    num_dense_layers: int = 0
    intermediate_size: int | None = None
    differs: str = ""

    def config(self, *, max_sequence_length: int, recompute: tuple[str, ...] = ()) -> DecoderConfig:
        """Return the config of a decoder with these sizes; for the arguments, see `DecoderConfig`."""
        moe = self.layer()
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=moe.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            moe=moe,
            num_dense_layers=self.num_dense_layers,
            max_sequence_length=max_sequence_length,
            recompute=recompute,
        )


# The sizes are from the configs that the presets name as sources.
PUBLISHED = {
    "mixtral": PublishedModel(
        name="Mixtral 8x7B",
        layer=presets.mixtral,
        num_layers=32,
        num_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
    ),
    "qwen2_moe": PublishedModel(
        name="Qwen2-57B-A14B",
        layer=presets.qwen2_moe,
        num_layers=28,
        num_heads=28,
        num_key_value_heads=4,
        vocab_size=151936,
        differs="no biases of queries, keys and values",
    ),
    "qwen3_moe": PublishedModel(
        name="Qwen3-235B-A22B",
        layer=presets.qwen3_moe,
        num_layers=94,
        num_heads=64,
        num_key_value_heads=4,
        vocab_size=151936,
        differs=_NORMED_HEADS,
    ),
    "qwen3_next": PublishedModel(
        name="Qwen3-Next-80B-A3B",
        layer=presets.qwen3_next,
        num_layers=48,
        num_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        vocab_size=151936,
        differs="plain attention in all layers instead of linear attention in three of four",
    ),
    "olmoe": PublishedModel(
        name="OLMoE-1B-7B",
        layer=presets.olmoe,
        num_layers=16,
        num_heads=16,
        num_key_value_heads=16,
        vocab_size=50304,
        differs=_NORMED_HEADS,
    ),
    "deepseek_v2": PublishedModel(
        name="DeepSeek-V2",
        layer=presets.deepseek_v2,
        num_layers=60,
        num_heads=128,
        num_key_value_heads=128,
        vocab_size=102400,
        num_dense_layers=1,
        intermediate_size=12288,
        differs=_LATENT,
    ),
    "deepseek_v3": PublishedModel(
        name="DeepSeek-V3",
        layer=presets.deepseek_v3,
        num_layers=61,
        num_heads=128,
        num_key_value_heads=128,
        vocab_size=129280,
        num_dense_layers=3,
        intermediate_size=18432,
        differs=_LATENT,
    ),
    "kimi_k2": PublishedModel(
        name="Kimi-K2",
        layer=presets.kimi_k2,
        num_layers=61,
        num_heads=64,
        num_key_value_heads=64,
        vocab_size=163840,
        num_dense_layers=1,
        intermediate_size=18432,
        differs=_LATENT,
    ),
    "glm4_moe": PublishedModel(
        name="GLM-4.5",
        layer=presets.glm4_moe,
        num_layers=92,
        num_heads=96,
        num_key_value_heads=8,
        vocab_size=151552,
        num_dense_layers=3,
        intermediate_size=12288,
        differs="no norms and no biases of queries and keys",
    ),
    "minimax_m2": PublishedModel(
        name="MiniMax-M2",
        layer=presets.minimax_m2,
        num_layers=62,
        num_heads=48,
        num_key_value_heads=8,
        vocab_size=200064,
        differs=_NORMED_HEADS,
    ),
    "gpt_oss": PublishedModel(
        name="gpt-oss-120b",
        layer=presets.gpt_oss,
        num_layers=36,
        num_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        differs="no biases and sinks of attention, and no sliding windows",
    ),
    "llama4": PublishedModel(
        name="Llama 4 Maverick",
        layer=presets.llama4,
        num_layers=48,
        num_heads=40,
        num_key_value_heads=8,
        vocab_size=202048,
        num_dense_layers=24,
        intermediate_size=16384,
        differs="the first half of the layers is dense instead of every other layer",
    ),
}
