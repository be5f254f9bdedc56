from maxmoe.config import MoEConfig
from maxmoe.families.family import MIXTRAL_FIELDS, Family, PublishedModel, sizes, without
from maxmoe.families.layouts import Entry, Layout, router, stacked


@PublishedModel(
    "gpt-oss-120b",
    layers=36,
    heads=(64, 8, 64),
    vocab_size=201088,
    differs="no biases and sinks of attention, and no sliding windows",
)
@Family(
    fields=without("activation", MIXTRAL_FIELDS) | {"activation_limit": "swiglu_limit"},
    required={"swiglu_alpha": [1.702]},
    block=Layout(
        "mlp",
        (
            *router("router"),
            Entry("router.bias", ("router.bias",)),
            *stacked(transposed=False, interleaved=True),
            Entry("experts.gate_up_proj_bias", ("experts.gate_bias", "experts.up_bias"), interleaved=True),
            Entry("experts.down_proj_bias", ("experts.down_bias",)),
        ),
    ),
    returns_scores=True,
)
def gpt_oss() -> MoEConfig:
    """gpt-oss-120b: biases in router and experts, clipped SwiGLU, softmax over the selected logits.

    The weight of the balance loss is not published. This preset has none, because the 0.9 in the config would outweigh
    any training loss.

    Source: OpenAI 2025 (arXiv:2508.10925); config of openai/gpt-oss-120b.
    """
    return MoEConfig(
        **sizes(2880, 2880, 128, 4),
        score_function="identity",
        router_bias=True,
        normalization="softmax",
        activation="swigluoai",
        activation_limit=7.0,
        expert_bias=True,
        load_balance_scope="batch",
    )
