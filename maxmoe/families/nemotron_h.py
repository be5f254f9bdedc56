from maxmoe.config import MoEConfig
from maxmoe.families.deepseek_v3 import deepseek_v3
from maxmoe.families.family import DEEPSEEK_V3_FIELDS, Family, Field, activation, attribute_at, num_of_width, sizes
from maxmoe.families.layouts import GATE_BIASED, PROJ, SHARED, Entry, Layout, stacked

_BESIDE = (
    *GATE_BIASED,
    *SHARED[1:],
    Entry("fc1_latent_proj.weight", ("latent_in.weight",), transposed=True, is_optional=True),
    Entry("fc2_latent_proj.weight", ("latent_out.weight",), transposed=True, is_optional=True),
)


@Family(
    fields=DEEPSEEK_V3_FIELDS
    | {
        "activation": Field("mlp_hidden_act", activation),
        "num_shared_experts": Field("moe_shared_expert_intermediate_size", num_of_width),
        "latent_size": Field("moe_latent_size", attribute_at),
    },
    required={"mlp_bias": [False]},
    block=Layout("mixer", stacked(gated=False) + _BESIDE),
    stored=Layout("mixer", PROJ[1:] + _BESIDE),
)
def nemotron_h() -> MoEConfig:
    """Nemotron 3 Nano: as `deepseek_v3` without groups, experts without gate, and a shared expert twice as wide.

    Larger models of the family have latent experts: `latent_size`.

    Source: NVIDIA 2025, Nemotron 3 Nano; config of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
    """
    return deepseek_v3(
        **sizes(2688, 1856, 128, 6), num_groups=1, top_k_groups=1, activation="relu2", gated=False, num_shared_experts=2
    )
