from maxmoe.config import MoEConfig
from maxmoe.families.family import FIELDS, Family, sizes
from maxmoe.families.layouts import GATE_BIASED, PROJECTIONS, Entry, Layout, router, stacked

_SCALE = Entry("gate.global_scale", ("router.scale",))


def _published(prefix: str, ours: str) -> tuple[Entry, ...]:
    up = Entry(f"{prefix}w13_weight", (f"{ours}.gate_proj", f"{ours}.up_proj"), transposed=True, interleaved=True)
    return up, Entry(f"{prefix}w2_weight", (f"{ours}.down_proj",), transposed=True)


@Family(
    model_types=("inkling_text",),
    fields=FIELDS
    | {
        "intermediate_size": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "routed_scaling_factor": "route_scale",
    },
    required={"shared_expert_sink": [True]},
    block=Layout(
        "mlp",
        (
            *GATE_BIASED,
            _SCALE,
            *stacked(),
            *(Entry(f"shared_experts.{name}", (f"shared_experts.{name}",), transposed=True) for name in PROJECTIONS),
        ),
    ),
    stored=Layout(
        "mlp",
        (
            *router("gate", correction_bias="gate.bias"),
            _SCALE,
            *_published("experts.", "experts"),
            *_published("shared_experts.shared_", "shared_experts"),
        ),
    ),
)
def inkling() -> MoEConfig:
    """Inkling: weights of two shared experts normalized with the weights of the six selected ones, and a trained scale.

    Source: InklingTextConfig of transformers 5.24; loss weights and the update rate of the bias are not published.
    """
    return MoEConfig(
        **sizes(6144, 3072, 256, 6),
        score_function="sigmoid",
        score_correction_bias=True,
        routed_scaling_factor=8.0,
        router_scale=True,
        num_shared_experts=2,
        shared_expert_scores=True,
    )
