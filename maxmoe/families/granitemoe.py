from maxmoe.config import MoEConfig
from maxmoe.families.family import MIXTRAL_FIELDS, Family, PublishedModel, sizes
from maxmoe.families.layouts import TWO_LINEARS, Layout, router, stacked


@PublishedModel(
    "Granite 3.0 3B-A800M",
    layers=32,
    heads=(24, 8, 64),
    vocab_size=49155,
    differs="no factors of embeddings, attention, residuals and logits",
)
@Family(
    model_types=("granitemoe", "granitemoehybrid", "granitemoeshared"),
    fields=MIXTRAL_FIELDS,
    block=Layout("block_sparse_moe", router("router") + stacked()),
    stored=Layout("block_sparse_moe", router("router.layer") + TWO_LINEARS),
)
def granitemoe() -> MoEConfig:
    """Granite 3.0 3B-A800M: softmax over the eight selected logits of forty.

    Source: config of ibm-granite/granite-3.0-3b-a800m-base.
    """
    return MoEConfig(
        **sizes(1536, 512, 40, 8),
        score_function="identity",
        normalization="softmax",
        load_balance_loss_weight=0.001 * 8,
        load_balance_scope="batch",
    )
