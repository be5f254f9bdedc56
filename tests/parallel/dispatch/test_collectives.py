"""Collectives over rows: each is the transpose of its backward, for any counts, and overlaps with computation."""

import gc
import itertools
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE
from maxmoe.parallel import parallelize
from maxmoe.parallel.dispatch import all_gather_rows, ragged_all_to_all, reduce_scatter_rows
from maxmoe.parallel.dispatch import collectives as dispatch_collectives
from maxmoe.parallel.dispatch.collectives import all_gather_counts
from maxmoe.parallel.plan.dispatch_plan import STRATEGIES, Dispatch
from maxmoe.sharding import Mesh
from support.dispatched_layer import FAMILIES, make_batch, make_layer, take_step
from support.moved_experts import free_moves
from support.run_ranks import fake_rank, run_cases, run_ranks

COUNTS = [(2, 2, 2, 2), (3, 0, 1, 5), (0, 0, 4, 0), (0, 0, 0, 0)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
Collective = Callable[[Tensor], Tensor]


def whole_numbers(num_rows: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3,)) -> Tensor:
    """Random small integers, whose sums are exact in every dtype; not contiguous."""
    return torch.randint(-4, 5, (num_rows, *shape, 2)).to(dtype)[..., 0]


def matrix_of(counts: Sequence[int]) -> Tensor:
    """Number of rows from each rank to each rank: any numbers, with `counts` added on the diagonal."""
    rank = torch.arange(len(counts))
    matrix = (rank.unsqueeze(1) * 3 + rank * 2) % 3 * (torch.tensor(counts) > 0)
    return matrix + torch.tensor(counts).diag()


def everywhere(value: Tensor) -> list[Tensor]:
    """The rows of all ranks, gathered as objects."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value.detach())
    return values


def check_transpose(collective: Collective, rows: Tensor, expected: Tensor) -> None:
    """Check the result against `expected`, and <P x, y> = <x, P' y> summed over the ranks, for a random y."""
    rows.requires_grad_()
    result = collective(rows)
    assert result.dtype == rows.dtype and result.equal(expected)
    cotangent = whole_numbers(len(result), result.dtype, result.shape[1:])
    (gradient,) = torch.autograd.grad(result, rows, cotangent)
    assert gradient.shape == rows.shape and gradient.dtype == rows.dtype
    forward = (result.detach().double() * cotangent.double()).sum()
    backward = (rows.detach().double() * gradient.double()).sum()
    sums = torch.stack((forward, backward))
    dist.all_reduce(sums)
    assert sums[0] == sums[1], sums


def check_all(counts: tuple[int, ...], dtype: torch.dtype, shape: tuple[int, ...] = (3,)) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(rank)
    rows = whole_numbers(counts[rank], dtype, shape)
    check_transpose(lambda rows: all_gather_rows(rows, counts, group, "rows")(), rows, torch.cat(everywhere(rows)))

    rows = whole_numbers(sum(counts), dtype, shape)
    summed = torch.stack(everywhere(rows)).sum(0).split(counts)[rank]
    check_transpose(lambda rows: reduce_scatter_rows(rows, counts, group, "rows")(), rows, summed)

    matrix = matrix_of(counts)
    send, receive = matrix[rank].tolist(), matrix[:, rank].tolist()
    rows = whole_numbers(sum(send), dtype, shape)
    parts = [rows.split(matrix[sender].tolist())[rank] for sender, rows in enumerate(everywhere(rows))]
    check_transpose(lambda rows: ragged_all_to_all(rows, send, receive, group, "rows")(), rows, torch.cat(parts))


def test_values_and_transposes() -> None:
    def check() -> None:
        for counts, dtype in itertools.product(COUNTS, DTYPES):
            check_all(counts, dtype)
        for shape in ((), (2, 3), (0,)):
            check_all(COUNTS[1], torch.float64, shape)

    run_ranks(check, 4)


def test_a_rank_computes_while_its_rows_travel() -> None:
    """Rank 1 starts only when rank 0 has finished its computation between start and wait, forward and backward."""

    def check(counts: tuple[int, int]) -> None:
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()

        def computed(name: str) -> None:
            if rank == 0:
                store.set(f"{name} {counts}", "computed")

        def await_rank_0(name: str) -> None:
            if rank == 1:
                store.wait([f"{name} {counts}"], timedelta(seconds=10))

        rows = torch.ones(counts[rank], 3, requires_grad=True)
        await_rank_0("forward")
        pending = all_gather_rows(rows, counts, dist.group.WORLD, "rows")
        other = rows.clone()
        other.register_hook(lambda _: computed("backward"))
        computed("forward")
        gathered = pending()
        gathered.register_hook(lambda _: await_rank_0("backward"))
        (gathered.sum() + other.sum()).backward()
        assert rows.grad is not None and rows.grad.eq(3).all()

    run_cases(check, 2, [((2, 2),), ((3, 1),)], timeout=10)


def test_what_nobody_waits_for_is_freed() -> None:
    """A recomputation of activation checkpointing stops when it has all tensors that the backward needs."""

    def check() -> int:
        before = alive()
        pending = all_gather_rows(torch.ones(3, 7, requires_grad=True), (3, 3), dist.group.WORLD, "rows")
        dist.barrier()
        del pending
        deadline = time.monotonic() + 10.0  # the thread of gloo may hold its tensors a moment longer
        while (left := alive() - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    def alive() -> int:
        gc.collect()
        return sum(type(found) is Tensor and found.shape == (6, 7) for found in gc.get_objects())

    assert run_ranks(check, 2) == [0, 0]


def test_a_step_leaves_no_process_group_and_no_tensor() -> None:
    batch = make_batch(FAMILIES["mixtral"], "three quarters to one expert")

    def remains(layer: MoE) -> tuple[int, int]:
        with free_moves():
            take_step(layer, batch)
        gc.collect()
        tensors = [type(found) for found in gc.get_objects() if issubclass(type(found), Tensor)]
        return len(dist.distributed_c10d._world.pg_map), len(tensors)

    def check(dispatch: Dispatch) -> None:
        gc.freeze()  # so that `remains` does not collect and list all imported objects each time
        layer = parallelize(make_layer(FAMILIES["mixtral"]), Mesh({"expert": 2}), "ep-as-dp", dispatch=dispatch)
        left = [remains(layer) for _ in range(4)]
        assert any(before >= after for before, after in itertools.pairwise(left)), left

    run_cases(check, 2, [(dispatch,) for dispatch in STRATEGIES])


@pytest.mark.parametrize(
    ("send", "receive", "message"),
    [
        ((1, 1), (1, 1, 0), "send and receive must have one count for each of 2 ranks, got 2 and 3"),
        ((4,), (2, 2), "send and receive must have one count for each of 2 ranks, got 1 and 2"),
        ((3, 2), (1, 1), "rows must have sum(send) = 5 rows, got 4"),
    ],
)
def test_wrong_counts(send: tuple[int, ...], receive: tuple[int, ...], message: str) -> None:
    with fake_rank(0, 2), pytest.raises(ValueError, match=f"^ragged_all_to_all: {re.escape(message)}$"):
        ragged_all_to_all(torch.ones(4, 3), send, receive, dist.group.WORLD, "rows")


def exchanges() -> Any:
    """A spy on the all-gathers of counts. `CommDebugMode` does not look into operators."""
    return patch.object(dispatch_collectives, "all_gather", wraps=dispatch_collectives.all_gather)  # type: ignore[attr-defined]


def test_a_recomputation_that_keeps_the_routing_does_not_gather_counts_again() -> None:
    def check() -> None:
        def block(x: Tensor) -> Tensor:
            counts, _ = all_gather_counts(torch.tensor([dist.get_rank() + 1]), dist.group.WORLD.group_name)
            return x.sin() * counts.sum()

        for options, expected in (({}, 1), ({"context_fn": maxmoe.keep_routing}, 0)):
            x = torch.ones(2, requires_grad=True)
            y = checkpoint(block, x, use_reentrant=False, **options)
            with exchanges() as backward:
                y.sum().backward()
            assert backward.call_count == expected
            assert x.grad is not None and torch.allclose(x.grad, 3 * torch.ones(2).cos())

    run_ranks(check, 2)


def test_one_exchange_of_counts_for_all_chunks_of_a_layer() -> None:
    """Rules that send tokens, and rules by which all ranks hold the same tokens."""
    batch = make_batch(FAMILIES["mixtral"], "of the router")

    def check(rules: str, dispatch: Dispatch) -> None:
        layer = make_layer(FAMILIES["mixtral"])
        parallelize(layer, Mesh({"expert": 2}), rules, dispatch=dispatch, num_chunks=3)
        with exchanges() as exchange:
            take_step(layer, batch)
        calls = [call for call in exchange.call_args_list if call.args[2] == "row counts"]
        assert len(calls) == (layer.runner.num_chunks > 1)

    run_cases(check, 2, itertools.product(("ep-as-dp", "ep-tp"), STRATEGIES))
