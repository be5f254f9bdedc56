from functools import partial

from maxmoe.config import MoEConfig
from maxmoe.families.family import Family, Field, activation, loss_weight, sizes
from maxmoe.families.layouts import Entry, Layout, router


@Family(
    fields={
        "hidden_size": "hidden_size",
        "intermediate_size": "d_ff",
        "num_experts": "num_experts",
        "activation": Field("dense_act_fn", activation),
        "load_balance_loss_weight": Field("router_aux_loss_coef", partial(loss_weight, top_k=None)),
        "router_z_loss_weight": "router_z_loss_coef",
    },
    required={"router_jitter_noise": [0.0], "dropout_rate": [0.0], "router_bias": [False]},
    block=Layout(
        "mlp",
        (
            *router("router.classifier"),
            Entry("experts.expert_{expert}.wi.weight", ("experts.up_proj",), transposed=True),
            Entry("experts.expert_{expert}.wo.weight", ("experts.down_proj",), transposed=True),
        ),
    ),
    logits_index=2,
    has_capacity=True,
    beyond_layer="a capacity, a number of tokens of a sequence after which an expert drops further ones",
)
def switch_transformers() -> MoEConfig:
    """Switch-C: one of 2048 experts without a gate; its weight is the softmax over all, and tokens are dropped.

    An expert takes 64 tokens of a sequence, which `maxmoe.integrations.transformers.replace_moe_blocks` keeps and a
    `maxmoe.MoE` does not: its `capacity_factor` counts in even loads.

    Source: Fedus et al. 2021 (arXiv:2101.03961), sections 2.2 and 5.6; config of google/switch-c-2048.
    """
    return MoEConfig(
        **sizes(2080, 6144, 2048, 1),
        normalization="none",
        activation="relu",
        gated=False,
        load_balance_loss_weight=0.001,
        load_balance_scope="sequence",
        router_z_loss_weight=0.001,
    )
