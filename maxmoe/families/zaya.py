from operator import attrgetter

from maxmoe.config import MoEConfig
from maxmoe.families.family import FIELDS, Family, LayerField, sizes
from maxmoe.families.layouts import Entry, Layout, router, stacked

_ROUTER = {
    "down_proj.weight": "down_weight",
    "down_proj.bias": "down_bias",
    "router_states_scale": "state_scale",
    "router_mlp.norm.weight": "norm_weight",
    "router_mlp.fc1.weight": "fc1_weight",
    "router_mlp.fc1.bias": "fc1_bias",
    "router_mlp.fc2.weight": "fc2_weight",
    "router_mlp.fc2.bias": "fc2_bias",
}


@Family(
    fields=FIELDS
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "num_experts",
        "router_hidden_size": "router_hidden_size",
        "norm_eps": "rms_norm_eps",
    },
    layer_fields={"router_takes_state": LayerField(lambda _config, layer: layer > 0, attrgetter("gate.use_eda"))},
    block=Layout(
        "mlp",
        (
            *router("gate.router_mlp.out_proj", correction_bias="gate.balancing_biases"),
            *(
                Entry(f"gate.{theirs}", (f"router.mlp.{ours}",), is_optional=ours == "state_scale")
                for theirs, ours in _ROUTER.items()
            ),
            *stacked(),
        ),
    ),
    has_state=True,
)
def zaya() -> MoEConfig:
    """ZAYA1-8B: one of 16 experts or none, chosen by a router with hidden layers and a state from the layer before.

    The zero expert skips the layer. The first layer takes no state: ``router_takes_state=False``. Layers are called
    with the state that the layer before returns.

    Source: Zyphra 2026, ZayaConfig of transformers 5.24, where the correction bias of the zero expert begins with -1;
    its update rate is not published.
    """
    return MoEConfig(
        **sizes(2048, 2048, 16, 1),
        num_zero_experts=1,
        score_correction_bias=True,
        router_hidden_size=256,
        router_takes_state=True,
        normalization="none",
    )
