"""The number of collectives of a parallelized module, and that it gathers no more than necessary."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from maxmoe import MoE, MoEFeedForward
from maxmoe.config import LoadBalanceScope
from maxmoe.parallel import parallelize
from maxmoe.sharding import Mesh
from support.parallel_decoder import CONFIG, MOE, decoder
from support.run_ranks import run_ranks


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


@pytest.mark.usefixtures("collectives_are_not_compared")
def test_tensor_parallel_parts_take_one_sum_and_gather_no_weight() -> None:
    def count() -> list[tuple[dict[str, int], dict[str, int]]]:
        model = parallelize(decoder(), Mesh({"expert": 2}), "ep-tp")
        return [
            collectives(part, hidden_states()) for part in (model.blocks[0].attention, model.blocks[0].feed_forward)
        ]

    once = {"c10d.allreduce_": 1}
    assert run_ranks(count, 2) == [[(once, once)] * 2] * 2


@pytest.mark.usefixtures("collectives_are_not_compared")
def test_routed_and_shared_experts_take_one_sum() -> None:
    """The backward takes one sum for the tokens and one for the routing weights."""
    config = replace(MOE, shared_expert_gate=False, load_balance_loss_weight=0.0, router_z_loss_weight=0.0)

    def count() -> tuple[dict[str, int], dict[str, int]]:
        layer = parallelize(MoEFeedForward(config).double(), Mesh({"expert": 2}), "ep-tp")
        return collectives(layer, hidden_states())

    # The all-gather of one integer: whether the input requires a gradient on all ranks.
    once, twice = {"c10d._allgather_base_": 1, "c10d.allreduce_": 1}, {"c10d.allreduce_": 2}
    assert run_ranks(count, 2) == [(once, twice)] * 2


@pytest.mark.usefixtures("collectives_are_not_compared")
def test_losses_and_statistics_of_a_layer_take_three_sums_over_each_axis() -> None:
    """All sums for balance loss, z-loss and statistics are reduced together."""

    def count(scope: LoadBalanceScope) -> tuple[int, list[torch.dtype]]:
        config = replace(MOE, load_balance_scope=scope)
        layer = parallelize(MoE(config).double(), Mesh({"fsdp": 2, "expert": 2}), "ep-as-cp")
        with CommDebugMode() as forward:
            output = layer(torch.randn(2, 4, config.hidden_size, dtype=torch.float64))
        counts = {str(name): count for name, count in forward.get_comm_counts().items()}
        return counts["c10d.allreduce_"], [tensor.dtype for tensor in output.stats]

    expected = 3 * 2, [torch.int64, torch.int64, torch.float64]
    assert run_ranks(lambda: [count("batch"), count("sequence")], 4) == [[expected] * 2] * 4


@pytest.mark.usefixtures("collectives_are_not_compared")
def test_heads_that_cannot_be_told_apart_are_gathered() -> None:
    """One key-value head for two ranks, which would share it."""

    def count() -> tuple[dict[str, int], dict[str, int]]:
        model = parallelize(decoder(replace(CONFIG, num_key_value_heads=1)), Mesh({"expert": 2}), "ep-tp")
        return collectives(model.blocks[0].attention, hidden_states())

    for forward, backward in run_ranks(count, 2):
        # Forward and backward gather the weights. Every rank has the whole gradient, and keeps its shard.
        assert forward == backward == {"c10d._allgather_base_": 4}
