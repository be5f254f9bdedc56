from maxmoe.config import MoEConfig
from maxmoe.families.family import QWEN2_FIELDS, Family, PublishedModel, sizes, without
from maxmoe.families.layouts import GATE_BIASED, PROJ, SHARED, Layout, router, stacked, within
from maxmoe.nn.selection import Selection


@PublishedModel(
    "Kolibri-1",
    layers=50,
    heads=(48, 4),
    vocab_size=128000,
    differs="full attention in all layers instead of sliding windows in four of five, no norms of queries and keys",
)
@Family(
    fields=without("load_balance_loss_weight", QWEN2_FIELDS),
    block=Layout("mlp", GATE_BIASED + stacked() + SHARED),
    stored=Layout("", router("mlp.gate", "moe.router.expert_bias") + within("mlp", PROJ + SHARED)),
)
def kolibri1() -> MoEConfig:
    """Kolibri-1: selected by logit plus correction bias, and weighted by the sigmoid of the selected logits alone.

    Source: Aleph Alpha 2026, Kolibri1Config of transformers 5.24; the update rate of the bias is not published.
    """
    return MoEConfig(
        **sizes(2560, 512, 384, 6),
        score_function="sigmoid",
        score_correction_bias=True,
        router=Selection(by="logits"),
        normalization="none",
        num_shared_experts=1,
    )
