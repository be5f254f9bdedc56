from maxmoe.config import MoEConfig
from maxmoe.families.family import MIXTRAL_FIELDS, NORMED_HEADS, Family, PublishedModel, sizes
from maxmoe.families.layouts import GATE_BIASED_OUTSIDE, W123, Layout, stacked


@PublishedModel("MiniMax-M2", layers=62, heads=(48, 8), vocab_size=200064, differs=NORMED_HEADS)
@Family(
    fields=MIXTRAL_FIELDS,
    required={"router_jitter_noise": [0.0]},
    block=Layout("mlp", GATE_BIASED_OUTSIDE + stacked()),
    stored=Layout("block_sparse_moe", GATE_BIASED_OUTSIDE + W123),
)
def minimax_m2() -> MoEConfig:
    """MiniMax-M2: sigmoid scores, a correction bias whose update rate is not published, no shared expert.

    Source: config of MiniMaxAI/MiniMax-M2.
    """
    return MoEConfig(
        **sizes(3072, 1536, 256, 8),
        score_function="sigmoid",
        score_correction_bias=True,
        load_balance_loss_weight=0.001 * 8,
        load_balance_scope="batch",
    )
