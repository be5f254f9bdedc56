"""`MoEConfig` of the families of 2026; see `maxmoe/presets/published.py`."""

from typing import Any

from maxmoe.components import ExpertNorms, ZeroComputation
from maxmoe.config import MoEConfig
from maxmoe.nn.limited_output import LimitedOutput
from maxmoe.nn.router_mlp import RouterMLP
from maxmoe.nn.scaled_logits import ScaledLogits
from maxmoe.nn.selection import Selection
from maxmoe.nn.shared_expert_scores import SharedExpertScores
from maxmoe.presets.published import _config, _layer_of, deepseek_v3


@_layer_of(
    "Kolibri-1",
    layers=50,
    heads=(48, 4),
    vocab_size=128000,
    differs="full attention in all layers instead of sliding windows in four of five, no norms of queries and keys",
)
def kolibri1(**overrides: Any) -> MoEConfig:
    """Kolibri-1: selected by logit plus correction bias, and weighted by the sigmoid of the selected logits alone.

    Source: Aleph Alpha 2026, Kolibri1Config of transformers 5.24; the update rate of the bias is not published.
    """
    return _config(
        overrides,
        sizes=(2560, 512, 384, 6),
        score_function="sigmoid",
        score_correction_bias=True,
        router=Selection(by="logits"),
        normalization="none",
        num_shared_experts=1,
    )


def axk2(**overrides: Any) -> MoEConfig:
    """A.X-K2-Light: as `deepseek_v3` without groups. Larger models have groups, and a score of zero in all others.

    Source: SK Telecom 2026, AXK2Config of transformers 5.24.
    """
    return _config(
        overrides,
        deepseek_v3,
        sizes=(2048, 512, 128, 8),
        num_groups=1,
        top_k_groups=1,
        router=Selection(other_groups="zero"),
    )


def mistral_large4(**overrides: Any) -> MoEConfig:
    """Mistral Large 4: four of 128 wide experts, weighted by their normalized softmax, and a shared expert.

    Source: Mistral AI 2026, MistralLarge4TextConfig of transformers 5.24; the loss weights are not published.
    """
    return _config(overrides, sizes=(6144, 6144, 128, 4), router=Selection(other_groups="zero"), num_shared_experts=1)


@_layer_of(
    "Beam",
    layers=52,
    heads=(48, 8),
    vocab_size=151936,
    dense=(3, 20480),
    differs="no gates of attention, no norms of its queries and keys, no sliding windows, no norms after the layers",
)
def beam(**overrides: Any) -> MoEConfig:
    """Beam: as `deepseek_v3` without a shared expert. The published factor of the sum is a factor of its weights here.

    Source: BeamConfig of transformers 5.24.
    """
    return _config(overrides, deepseek_v3, sizes=(5120, 2560, 256, 8), num_shared_experts=0)


def inkling(**overrides: Any) -> MoEConfig:
    """Inkling: weights of two shared experts normalized with the weights of the six selected ones, and a trained scale.

    Source: InklingTextConfig of transformers 5.24; loss weights and the update rate of the bias are not published.
    """
    return _config(
        overrides,
        sizes=(6144, 3072, 256, 6),
        score_function="sigmoid",
        score_correction_bias=True,
        routed_scaling_factor=8.0,
        router=SharedExpertScores(),
        num_shared_experts=2,
    )


def muse_spark(**overrides: Any) -> MoEConfig:
    """Muse Spark: latent experts half as wide as the tokens, with norms before and after each, and scaled logits.

    Source: MuseSparkTextConfig of transformers 5.24; loss weights and the update rate of the bias are not published.
    """
    return _config(
        overrides,
        sizes=(8192, 4096, 256, 8),
        latent_size=4096,
        score_function="sigmoid",
        score_correction_bias=True,
        router=ScaledLogits(scale=0.1767766952966369),
        expert_norms=ExpertNorms(latent_in=True, output=True),
    )


@_layer_of(
    "Step-3.7-Flash",
    layers=45,
    heads=(64, 8),
    vocab_size=128815,
    dense=(3, 11264),
    differs="no gates of attention, no norms of its queries and keys, full attention in all layers",
)
def step3p7(**overrides: Any) -> MoEConfig:
    """Step-3.7-Flash: sigmoid scores, a correction bias, and a shared expert; the weights are multiplied by 3.

    Its last two layers have ``LimitedOutput(limit=7.0, shared_limit=16.0)``.

    Source: StepFun 2026, Step3p7TextConfig of transformers 5.24; the factor is the one of Step-3.5-Flash. The update
    rate of the bias is not published.
    """
    return _config(
        overrides,
        sizes=(4096, 1280, 288, 8),
        score_function="sigmoid",
        score_correction_bias=True,
        routed_scaling_factor=3.0,
        num_shared_experts=1,
        activation=LimitedOutput(),
    )


def zaya(**overrides: Any) -> MoEConfig:
    """ZAYA1-8B: one of 16 experts or none, chosen by a router with hidden layers and a state from the layer before.

    The zero expert skips the layer. The first layer takes no state: ``RouterMLP(takes_state=False)``. Layers are called
    with the state that the layer before returns.

    Source: Zyphra 2026, ZayaConfig of transformers 5.24, where the correction bias of the zero expert begins with -1;
    its update rate is not published.
    """
    return _config(
        overrides,
        sizes=(2048, 2048, 16, 1),
        zero_computation=ZeroComputation(zero=1),
        score_correction_bias=True,
        router=RouterMLP(hidden_size=256, takes_state=True),
        normalization="none",
    )
