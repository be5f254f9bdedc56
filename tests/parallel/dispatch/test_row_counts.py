"""The counts of all ranks: values, device, and that a recomputation does not gather them again."""

import itertools
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import parallelize
from maxmoe.parallel.dispatch.collectives import all_gather_counts
from maxmoe.parallel.plan.dispatch_plan import STRATEGIES
from maxmoe.sharding import Mesh
from support.dispatched_layer import FAMILIES, make_batch, make_layer, take_step
from support.run_ranks import run_ranks


def test_rows_are_those_of_the_ranks_on_the_device_and_on_the_host() -> None:
    def check() -> list[Tensor]:
        rank = dist.get_rank()
        whole = torch.arange(6).view(3, 2)[rank].repeat_interleave(2)  # with a stride that is not one
        device, host = all_gather_counts(whole[::2], dist.group.WORLD.group_name)
        assert device.data_ptr() != host.data_ptr() and host.device.type == "cpu"
        return [device, host]

    for gathered in run_ranks(check, 3):
        assert all(counts.equal(torch.arange(6).view(3, 2)) for counts in gathered)


def test_a_group_of_some_ranks() -> None:
    def check() -> list[list[int]]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = dist.get_rank()
        gathered, _ = all_gather_counts(torch.tensor([rank]), groups[rank % 2].group_name)
        rows: list[list[int]] = gathered.tolist()
        return rows

    assert run_ranks(check, 4) == [[[0], [2]], [[1], [3]], [[0], [2]], [[1], [3]]]


def test_a_recomputation_that_keeps_the_routing_does_not_gather_again() -> None:
    def check() -> list[int]:
        x, gathers = torch.ones(2, requires_grad=True), []
        # CommDebugMode does not look into operators.
        spy = patch.object(
            maxmoe.parallel.dispatch.collectives, "all_gather", wraps=maxmoe.parallel.dispatch.collectives.all_gather
        )

        def block(x: Tensor) -> Tensor:
            counts, _ = all_gather_counts(torch.tensor([dist.get_rank() + 1]), dist.group.WORLD.group_name)
            return x.sin() * counts.sum()

        for options in ({}, {"context_fn": maxmoe.keep_routing}):
            y = checkpoint(block, x, use_reentrant=False, **options)
            with spy as backward:
                y.sum().backward()
            gathers.append(backward.call_count)
        assert x.grad is not None and torch.allclose(x.grad, 6 * torch.ones(2).cos())
        return gathers

    assert run_ranks(check, 2) == [[1, 0]] * 2


def test_one_exchange_for_all_chunks_of_a_layer() -> None:
    """Rules that send tokens, and rules by which all ranks hold the same tokens."""
    batch = make_batch(FAMILIES["mixtral"], "of the router")

    def check() -> None:
        for rules, dispatch in itertools.product(("ep-as-dp", "ep-tp"), STRATEGIES):
            mesh = Mesh({"expert": 2})
            layer = parallelize(make_layer(FAMILIES["mixtral"]), mesh, rules, dispatch=dispatch, num_chunks=3)
            counts = maxmoe.parallel.dispatch.collectives
            with patch.object(counts, "all_gather", wraps=counts.all_gather) as exchange:
                take_step(layer, batch)
            sends = layer.runner.num_chunks > 1
            exchanges = [call for call in exchange.call_args_list if call.args[2] == "row counts"]
            assert len(exchanges) == sends, (rules, dispatch)

    run_ranks(check, 2)
