from maxmoe.config import MoEConfig
from maxmoe.families.family import NORMED_HEADS, QWEN3_FIELDS, Family, PublishedModel, sizes
from maxmoe.families.layouts import GATE, PROJ, Layout, stacked


@PublishedModel("Qwen3-235B-A22B", layers=94, heads=(64, 4), vocab_size=151936, differs=NORMED_HEADS)
@Family(
    model_types=("qwen3_moe", "mellum"),
    fields=QWEN3_FIELDS,
    block=Layout("mlp", GATE + stacked()),
    stored=Layout("mlp", GATE + PROJ),
)
def qwen3_moe() -> MoEConfig:
    """Qwen3-235B-A22B: fine-grained experts, no shared expert, balance loss over the global batch.

    Source: Yang et al. 2025 (arXiv:2505.09388); config of Qwen/Qwen3-235B-A22B.
    """
    return MoEConfig(**sizes(4096, 1536, 128, 8), load_balance_loss_weight=0.001 * 8, load_balance_scope="batch")
