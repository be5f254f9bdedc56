"""Hidden states that are sharded along the hidden dim between modules."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from maxmoe.parallel import parallelize
from maxmoe.sharding import LogicalRules, Mesh
from support.counted_collectives import CountedCollectives
from support.parallel_decoder import CONFIG, MOE, batch, decoder, loss, step_of_one_process, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_ranks

EMBED_SHARDED = LogicalRules.load("ep-tp").override([("activation_embed", ("expert",))])
CONFIGS = {
    "experts with biases, shared experts with a gate": CONFIG,
    # Three heads, and shared experts of width 9, are not divisible by two ranks.
    "parts that every rank computes whole": replace(
        CONFIG, num_heads=3, num_key_value_heads=3, moe=replace(MOE, intermediate_size=9)
    ),
    "recomputed, tied, outputs of experts gathered": replace(
        CONFIG, tie_embeddings=True, recompute=("blocks",), moe=replace(MOE, top_k=1, normalization="none")
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sizes", [{"expert": 2}, {"data": 2, "expert": 2}], ids=str)
def test_a_training_step_equals_that_of_one_process(name: str, sizes: dict[str, int]) -> None:
    config = CONFIGS[name]
    expected = step_of_one_process(config)

    def check() -> None:
        mesh = Mesh(sizes)
        model: Any = parallelize(decoder(config), mesh, EMBED_SHARDED)
        spec = token_spec(mesh, EMBED_SHARDED)
        tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
        output = model(tokens)
        loss(output, targets).backward()
        assert_same(output.logits, part_by_definition(expected.output.logits, spec, mesh), "logits")
        for parameter_name, parameter in model.named_parameters():
            assert_same(parameter.grad.full_tensor(), expected.gradients[parameter_name], parameter_name)

    run_ranks(check, Mesh.planned(sizes).num_ranks)


@pytest.mark.usefixtures("collectives_are_not_compared")
def test_all_gathers_and_reduce_scatters_take_the_place_of_all_reduces() -> None:
    """Two parts of each of two blocks read the stream and add to it; the last norm reads it."""
    losses = {"load_balance_loss_weight": 0.0, "router_z_loss_weight": 0.0}
    config = replace(CONFIG, moe=replace(MOE, shared_expert_gate=False, **losses))

    def count() -> tuple[int, dict[str, int], dict[str, int]]:
        mesh = Mesh({"expert": 2})
        model: Any = parallelize(decoder(config), mesh, EMBED_SHARDED)
        widths: list[int] = []
        model.blocks[1].register_forward_pre_hook(lambda _block, arguments: widths.append(arguments[0].shape[-1]))
        with CountedCollectives(mesh) as forward:
            output: Tensor = model(batch()[0]).logits
        with CountedCollectives(mesh) as backward:
            output.sum().backward()
        times = [{kind: times for (kind, _), (times, _) in mode.counts.items()} for mode in (forward, backward)]
        return widths[0], times[0], times[1]

    norms_and_routing_weights = 2 + 1  # the two norms of a block together
    for width, forward, backward in run_ranks(count, 2):
        assert width == CONFIG.hidden_size // 2
        assert forward == {"all-gather": 5, "reduce-scatter": 4}
        assert backward == {"all-gather": 5, "reduce-scatter": 4, "all-reduce": norms_and_routing_weights}
