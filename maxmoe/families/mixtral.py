from maxmoe.config import MoEConfig
from maxmoe.families.family import MIXTRAL_FIELDS, Family, PublishedModel, sizes
from maxmoe.families.layouts import GATE, W123, Layout, stacked


@PublishedModel("Mixtral 8x7B", layers=32, heads=(32, 8), vocab_size=32000)
@Family(
    model_types=("mixtral", "minimax"),
    fields=MIXTRAL_FIELDS,
    required={"router_jitter_noise": [0.0]},
    block=Layout("mlp", GATE + stacked()),
    stored=Layout("block_sparse_moe", GATE + W123),
)
def mixtral() -> MoEConfig:
    """Mixtral 8x7B: softmax over the two selected experts, balance loss over the batch.

    Source: Jiang et al. 2024 (arXiv:2401.04088); config of mistralai/Mixtral-8x7B-v0.1.
    """
    return MoEConfig(**sizes(4096, 14336, 8, 2), load_balance_loss_weight=0.02 * 2, load_balance_scope="batch")
