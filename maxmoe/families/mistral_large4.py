from maxmoe.config import MoEConfig
from maxmoe.families.family import DEEPSEEK_FIELDS, Family, sizes
from maxmoe.families.layouts import GATE, SHARED, W123, Layout, shared, stacked
from maxmoe.nn.selection import Selection


@Family(
    model_types=("mistral_large4_text",),
    fields=DEEPSEEK_FIELDS,
    block=Layout("mlp", GATE + stacked() + SHARED),
    stored=Layout("", GATE + W123 + shared("shared_experts", "w1", "w3", "w2")),
)
def mistral_large4() -> MoEConfig:
    """Mistral Large 4: four of 128 wide experts, weighted by their normalized softmax, and a shared expert.

    Source: Mistral AI 2026, MistralLarge4TextConfig of transformers 5.24; the loss weights are not published.
    """
    return MoEConfig(**sizes(6144, 6144, 128, 4), router=Selection(other_groups="zero"), num_shared_experts=1)
