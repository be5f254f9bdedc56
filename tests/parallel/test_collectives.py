"""The number of collectives of a parallelized module, and that it gathers no more than necessary."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from maxmoe import MoE, MoEFeedForward
from maxmoe.parallel import parallelize
from maxmoe.sharding import LogicalRules, Mesh
from support.counted_collectives import CountedCollectives
from support.parallel_decoder import CONFIG, MOE, batch, decoder
from support.run_ranks import fake_rank, run_ranks


def collectives(module: nn.Module, x: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Number of calls of each collective in forward, and in backward."""
    with CommDebugMode() as forward:
        output = module(x)
    with CommDebugMode() as backward:
        output.sum().backward()
    counts = tuple({str(name): count for name, count in mode.get_comm_counts().items()} for mode in (forward, backward))
    return counts[0], counts[1]


def hidden_states() -> Tensor:
    return torch.randn(2, 8, CONFIG.hidden_size, dtype=torch.float64, requires_grad=True)


def test_tensor_parallel_parts_take_one_sum_and_gather_no_weight() -> None:
    once = {"c10d.allreduce_": 1}
    with fake_rank(0, 2):
        block = parallelize(decoder(), Mesh({"expert": 2}), "ep-tp").blocks[0]
        for part in (block.attention, block.feed_forward):
            assert collectives(part, hidden_states()) == (once, once)


def test_routed_and_shared_experts_take_one_sum() -> None:
    """The backward takes one sum for the tokens and one for the routing weights."""
    config = replace(MOE, shared_expert_gate=False, load_balance_loss_weight=0.0, router_z_loss_weight=0.0)

    def check() -> None:
        layer = parallelize(MoEFeedForward(config).double(), Mesh({"expert": 2}), "ep-tp")
        # The all-gather of one integer: whether the input requires a gradient on all ranks.
        once, twice = {"c10d._allgather_base_": 1, "c10d.allreduce_": 1}, {"c10d.allreduce_": 2}
        assert collectives(layer, hidden_states()) == (once, twice)

    run_ranks(check, 2)


def test_losses_and_statistics_of_a_layer_take_three_sums_over_each_axis() -> None:
    """All sums for balance loss, z-loss and statistics are reduced together."""
    for scope in ("batch", "sequence"):
        layer = MoE(replace(MOE, load_balance_scope=scope)).double()
        with fake_rank(0, 4):
            parallelize(layer, Mesh({"fsdp": 2, "expert": 2}), "ep-as-cp")
            with CommDebugMode() as forward:
                output = layer(torch.randn(2, 4, MOE.hidden_size, dtype=torch.float64))
        counts = {str(name): count for name, count in forward.get_comm_counts().items()}
        assert counts["c10d.allreduce_"] == 3 * 2
        assert [tensor.dtype for tensor in output.stats] == [torch.int64, torch.int64, torch.float64]


def test_heads_that_cannot_be_told_apart_are_gathered() -> None:
    """One key-value head for two ranks, which would share it."""
    with fake_rank(0, 2):
        model = parallelize(decoder(replace(CONFIG, num_key_value_heads=1)), Mesh({"expert": 2}), "ep-tp")
        forward, backward = collectives(model.blocks[0].attention, hidden_states())
        # Forward and backward gather the weights. Every rank has the whole gradient, and keeps its shard.
        assert forward == backward == {"c10d._allgather_base_": 4}


def test_all_gathers_and_reduce_scatters_take_the_place_of_all_reduces() -> None:
    """If a rule shards the hidden states between modules: two parts of each of two blocks read them and add to them."""
    losses = {"load_balance_loss_weight": 0.0, "router_z_loss_weight": 0.0}
    rules = LogicalRules.load("ep-tp").override([("activation_embed", ("expert",))])
    config = replace(CONFIG, moe=replace(MOE, shared_expert_gate=False, **losses))

    norms_and_routing_weights = 2 + 1  # the two norms of a block together

    def check() -> None:
        mesh = Mesh({"expert": 2})
        model: Any = parallelize(decoder(config), mesh, rules)
        widths: list[int] = []
        model.blocks[1].register_forward_pre_hook(lambda _block, arguments: widths.append(arguments[0].shape[-1]))
        with CountedCollectives(mesh) as forward:
            output: Tensor = model(batch()[0]).logits
        with CountedCollectives(mesh) as backward:
            output.sum().backward()
        assert widths == [CONFIG.hidden_size // 2]
        counts = [{kind: times for (kind, _), (times, _) in mode.counts.items()} for mode in (forward, backward)]
        assert counts[0] == {"all-gather": 5, "reduce-scatter": 4}
        assert counts[1] == {"all-gather": 5, "reduce-scatter": 4, "all-reduce": norms_and_routing_weights}

    run_ranks(check, 2)
