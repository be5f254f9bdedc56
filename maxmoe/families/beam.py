from maxmoe.config import MoEConfig
from maxmoe.families.deepseek_v3 import deepseek_v3
from maxmoe.families.family import DEEPSEEK_V3_FIELDS, Family, PublishedModel, sizes, without
from maxmoe.families.layouts import GATE_BIASED, PROJ, Layout, stacked


@PublishedModel(
    "Beam",
    layers=52,
    heads=(48, 8),
    vocab_size=151936,
    dense=(3, 20480),
    differs="no gates of attention, no norms of its queries and keys, no sliding windows, no norms after the layers",
)
@Family(
    fields=without("num_shared_experts", DEEPSEEK_V3_FIELDS) | {"num_experts": "num_experts"},
    block=Layout("mlp", GATE_BIASED + stacked()),
    stored=Layout("mlp", GATE_BIASED + PROJ),
    scales_sum=True,
)
def beam() -> MoEConfig:
    """Beam: as `deepseek_v3` without a shared expert. The published factor of the sum is a factor of its weights here.

    Source: BeamConfig of transformers 5.24.
    """
    return deepseek_v3(**sizes(5120, 2560, 256, 8), num_shared_experts=0)
