from maxmoe.config import MoEConfig
from maxmoe.families.family import NORMED_HEADS, QWEN3_FIELDS, Family, PublishedModel, sizes
from maxmoe.families.layouts import GATE, PROJ, Layout, stacked


@PublishedModel("OLMoE-1B-7B", layers=16, heads=(16,), vocab_size=50304, differs=NORMED_HEADS)
@Family(
    model_types=("olmoe", "flex_olmo"),
    fields=QWEN3_FIELDS | {"intermediate_size": "intermediate_size"},
    block=Layout("mlp", GATE + stacked()),
    stored=Layout("mlp", GATE + PROJ),
)
def olmoe() -> MoEConfig:
    """OLMoE-1B-7B: softmax over all experts, weights not renormalized, with balance loss and z-loss.

    Its training code defines the balance loss as `maxmoe.nn.load_balance_loss`, so the weight is the published one.

    Source: Muennighoff et al. 2024 (arXiv:2409.02060); config of allenai/OLMoE-1B-7B-0924.
    """
    return MoEConfig(
        **sizes(2048, 1024, 64, 8),
        normalization="none",
        load_balance_loss_weight=0.01,
        load_balance_scope="batch",
        router_z_loss_weight=0.001,
    )
