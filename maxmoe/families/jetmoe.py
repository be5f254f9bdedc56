from maxmoe.config import MoEConfig
from maxmoe.families.family import MIXTRAL_FIELDS, Family, Field, activation, loss_weight, sizes
from maxmoe.families.layouts import TWO_LINEARS, Layout, router


@Family(
    fields=MIXTRAL_FIELDS
    | {
        "activation": Field("activation_function", activation),
        "load_balance_loss_weight": Field("aux_loss_coef", loss_weight),
    },
    block=Layout("mlp", router("router.layer") + TWO_LINEARS),
    logits_index=4,
    own_parameters=("bias",),
    beyond_layer="a bias that is added to their output",
)
def jetmoe() -> MoEConfig:
    """JetMoE-8B: softmax over the two selected logits. A bias is added to the output, which a `maxmoe.MoE` lacks.

    Attention heads are experts there as well, which are no part of the layer.

    Source: Shen et al. 2024 (arXiv:2404.07413); config of jetmoe/jetmoe-8b.
    """
    return MoEConfig(
        **sizes(2048, 5632, 8, 2),
        score_function="identity",
        normalization="softmax",
        load_balance_loss_weight=0.01 * 2,
        load_balance_scope="batch",
    )
