from maxmoe.config import MoEConfig
from maxmoe.families.family import MIXTRAL_FIELDS, Family, PublishedModel, sizes
from maxmoe.families.layouts import Layout, router, shared, stacked


@PublishedModel(
    "Llama 4 Maverick",
    layers=48,
    heads=(40, 8),
    vocab_size=202048,
    dense=(24, 16384),
    differs="the first half of the layers is dense instead of every other layer",
)
@Family(
    model_types=("llama4_text",),
    fields=MIXTRAL_FIELDS,
    block=Layout("feed_forward", router("router") + stacked(transposed=False) + shared("shared_expert")),
    returns_scores=True,
    logits_index=1,
)
def llama4() -> MoEConfig:
    """Llama 4 Maverick: one expert per token, with its input scaled by the sigmoid of the logit, and a shared expert.

    Source: config of meta-llama/Llama-4-Maverick-17B-128E.
    """
    return MoEConfig(
        **sizes(5120, 8192, 128, 1),
        score_function="sigmoid",
        normalization="none",
        apply_weights_to="input",
        num_shared_experts=1,
        load_balance_loss_weight=0.001,
        load_balance_scope="batch",
    )
