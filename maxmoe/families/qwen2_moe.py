from maxmoe.config import MoEConfig
from maxmoe.families.family import QWEN2_FIELDS, Family, PublishedModel, sizes
from maxmoe.families.layouts import GATE, PROJ, Entry, Layout, shared, stacked

_SHARED = (
    *shared("shared_expert"),
    Entry("shared_expert_gate.weight", ("shared_experts.output_gate",), unsqueezed=True),
)
QWEN2_MOE = Family(
    fields=QWEN2_FIELDS,
    block=Layout("mlp", GATE + stacked() + _SHARED),
    stored=Layout("mlp", GATE + PROJ + _SHARED),
)


@PublishedModel(
    "Qwen2-57B-A14B", layers=28, heads=(28, 4), vocab_size=151936, differs="no biases of queries, keys and values"
)
@QWEN2_MOE
def qwen2_moe() -> MoEConfig:
    """Qwen2-57B-A14B: softmax over all experts, weights not renormalized, and a gated shared expert.

    Source: Yang et al. 2024 (arXiv:2407.10671); config of Qwen/Qwen2-57B-A14B.
    """
    return MoEConfig(
        **sizes(3584, 2560, 64, 8),
        normalization="none",
        num_shared_experts=8,
        shared_expert_gate=True,
        load_balance_loss_weight=0.001 * 8,
        load_balance_scope="batch",
    )
