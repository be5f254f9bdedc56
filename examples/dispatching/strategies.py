"""The strategies that are compared, and the config of the model."""

from dataclasses import dataclass, field

from maxmoe import presets
from maxmoe.models import DecoderConfig
from maxmoe.parallel.plan.dispatch_plan import Dispatch

VOCAB_SIZE = 256  # the tokens are bytes


@dataclass(frozen=True)
class Strategy:
    """A way to shard the model and a batch over ranks.

    Args:
        name: name in tables and pictures.
        implementation: implementation of the experts, "sparse" or "dense".
        rules: name of a preset of rules.
        mesh: sizes by axis; empty for one process.
        dispatch: argument of `maxmoe.parallelize`.
    """

    name: str
    implementation: str = "sparse"
    rules: str = "default"
    mesh: dict[str, int] = field(default_factory=dict)
    dispatch: Dispatch = "auto"


ONE_PROCESS = Strategy("one process")


def strategies(num_ranks: int) -> list[Strategy]:
    """Return the strategies for an even number of ranks."""
    half, P = num_ranks // 2, num_ranks
    return [
        Strategy(f"ring of experts, EP{P}", "sparse", "ep-as-dp", {"expert": P}, "ring_of_experts"),
        Strategy(f"ragged all-to-all, EP{P}", "sparse", "ep-as-dp", {"expert": P}, "ragged_all_to_all"),
        Strategy(f"FSDP{P}", "sparse", "pure-fsdp", {"fsdp": P}),
        Strategy(f"dense, FSDP{P}", "dense", "pure-fsdp", {"fsdp": P}),
        Strategy(f"dense, EP{P}", "dense", "ep-as-dp", {"expert": P}),
        Strategy(f"FSDP2 x EP{half}", "sparse", "ep-as-dp", {"fsdp": 2, "expert": half}),
        Strategy(f"shard-exp-on-fsdp 2x{half}", "sparse", "shard-exp-on-fsdp", {"fsdp": 2, "expert": half}),
        Strategy(f"ep-tp 2x{half}", "sparse", "ep-tp", {"data": 2, "expert": half}),
    ]


def muon_strategies(num_ranks: int) -> list[Strategy]:
    """Return the shardings that Muon is compared under: parts of experts, whole experts over FSDP or expert axes."""
    P = num_ranks
    return [
        Strategy(f"shard-exp-on-fsdp, FSDP{P}", rules="shard-exp-on-fsdp", mesh={"fsdp": P}),
        Strategy(f"ep-as-dp, EP{P}", rules="ep-as-dp", mesh={"expert": P}),
        Strategy(f"pure-fsdp, FSDP{P}", rules="pure-fsdp", mesh={"fsdp": P}),
    ]


def model_config(strategy: Strategy, *, random_routing: bool, sequence_length: int) -> DecoderConfig:
    """Return the config of a small model like DeepSeek-V3: a dense block, then MoE blocks with groups of experts.

    Args:
        strategy: determines the implementation of the experts.
        random_routing: whether the router scores are random.
        sequence_length: sequence length of the batches.

    Returns:
        The config.
    """
    moe = presets.deepseek_v3(
        hidden_size=128,
        intermediate_size=64,
        num_experts=32,
        top_k=4,
        num_groups=8,
        top_k_groups=4,
        router="random" if random_routing else "learned",
        implementation=strategy.implementation,
    )
    return DecoderConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_layers=3,
        num_heads=8,
        intermediate_size=256,
        moe=moe,
        num_dense_layers=1,
        max_sequence_length=sequence_length,
    )
