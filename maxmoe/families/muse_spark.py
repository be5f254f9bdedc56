from maxmoe.config import MoEConfig
from maxmoe.families.family import FIELDS, Family, sizes
from maxmoe.families.layouts import GATE_BIASED, Entry, Layout, stacked


@Family(
    model_types=("muse_spark_text",),
    fields=FIELDS
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "num_local_experts",
        "latent_size": "moe_hidden_size",
        "logit_scale": "output_multiplier",
        "routed_scaling_factor": "routed_scaling_factor",
        "norm_eps": "rms_norm_eps",
        "expert_norm_eps": "post_norm_eps",
    },
    block=Layout(
        "mlp",
        (
            *GATE_BIASED,
            *stacked(),
            Entry("experts.post_expert_norm.weight", ("experts.norm.weight",)),
            Entry("pre_expert_proj.weight", ("latent_in.weight",), transposed=True),
            Entry("pre_expert_norm.weight", ("latent_in.norm.weight",)),
            Entry("post_expert_proj.weight", ("latent_out.weight",), transposed=True),
        ),
    ),
)
def muse_spark() -> MoEConfig:
    """Muse Spark: latent experts half as wide as the tokens, with norms before and after each, and scaled logits.

    Source: MuseSparkTextConfig of transformers 5.24; loss weights and the update rate of the bias are not published.
    """
    return MoEConfig(
        **sizes(8192, 4096, 256, 8),
        latent_size=4096,
        latent_in_norm=True,
        score_function="sigmoid",
        score_correction_bias=True,
        logit_scale=0.1767766952966369,
        expert_norm=True,
    )
