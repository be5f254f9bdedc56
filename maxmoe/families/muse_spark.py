from typing import Any

from torch import Tensor

from maxmoe.checks.fields import check_number
from maxmoe.config import MoEConfig
from maxmoe.config.components import ExpertNorms, RouterRule, component
from maxmoe.families.family import FIELDS, Family, Field, number_at, sizes
from maxmoe.families.layouts import GATE_BIASED, Entry, Layout, stacked


@component
class ScaledLogits(RouterRule):
    """Router whose logits are scale * (x @ weight^T + bias), as in Muse Spark."""

    scale: float

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0)

    def logits(self, products: Tensor) -> Tensor:
        """Multiply the linear map by the scale."""
        return products * self.scale

    def reference_logits(self, logits: Tensor) -> Tensor:
        """Multiply the linear map by the scale."""
        return self.scale * logits


def _scaled_logits(config: Any, path: str) -> ScaledLogits:
    return ScaledLogits(scale=number_at(config, path, above=0))


def _expert_norms(config: Any, path: str) -> ExpertNorms:
    eps, output_eps = (number_at(config, name, above=0) for name in (path, "post_norm_eps"))
    return ExpertNorms(latent_in=True, output=True, eps=eps, output_eps=output_eps)


@Family(
    model_types=("muse_spark_text",),
    fields=FIELDS
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "num_local_experts",
        "latent_size": "moe_hidden_size",
        "router": Field("output_multiplier", _scaled_logits),
        "routed_scaling_factor": "routed_scaling_factor",
        "expert_norms": Field("rms_norm_eps", _expert_norms),
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
        score_function="sigmoid",
        score_correction_bias=True,
        router=ScaledLogits(scale=0.1767766952966369),
        expert_norms=ExpertNorms(latent_in=True, output=True),
    )
