"""Named collectives of torch.distributed: results, and errors of ranks that call different ones."""

import pytest
import torch
import torch.distributed as dist

from maxmoe.ranks import named_collectives
from support.run_ranks import run_ranks


def test_values() -> None:
    def check() -> None:
        rank = dist.get_rank()
        before, mine = named_collectives.num_started(), torch.arange(4.0).view(2, 2) + 10 * rank
        whole = mine.new_empty(4, 2)
        named_collectives.all_gather(whole, mine, "x")
        assert whole.equal(torch.cat([torch.arange(4.0).view(2, 2), torch.arange(4.0).view(2, 2) + 10]))
        part = mine.new_empty(1, 2)
        named_collectives.reduce_scatter(part, mine, "x")
        assert part.equal((2 * torch.arange(4.0).view(2, 2) + 10)[rank : rank + 1])
        total = mine.clone()
        named_collectives.all_reduce(total, "x")
        assert total.equal(2 * torch.arange(4.0).view(2, 2) + 10)
        received = mine.new_empty(2, 2)
        named_collectives.all_to_all(received, mine, [1, 1], [1, 1], "x").wait()
        assert received.equal(whole[rank::2])
        named_collectives.broadcast(mine, "x")
        assert mine.equal(whole[:2])
        assert named_collectives.num_started() == before + 5

    run_ranks(check, 2)


@pytest.mark.parametrize("is_compared", [False, True])
def test_collectives_of_equal_size_in_another_order(monkeypatch: pytest.MonkeyPatch, is_compared: bool) -> None:
    """The ranks exchange wrong values unless the environment variable turns the comparison on."""
    if is_compared:
        monkeypatch.setenv(named_collectives.CHECK_VARIABLE, "1")

    def check() -> None:
        values = {"a": torch.ones(3), "b": torch.zeros(3)}
        for name in ("a", "b") if dist.get_rank() == 0 else ("b", "a"):
            named_collectives.all_reduce(values[name], name)
        assert not is_compared and values["a"].equal(torch.ones(3))

    def check_error() -> None:
        expected = r"agree on the next collective: rank 0 has the all-reduce of a, float32 \(3,\), rank 1 has the .* b"
        with pytest.raises(ValueError, match=expected):
            check()

    run_ranks(check_error if is_compared else check, 2)


DIFFERENCES = {
    "kind": lambda rank: (
        named_collectives.broadcast(torch.ones(3), "x") if rank else named_collectives.all_reduce(torch.ones(3), "x")
    ),
    "dtype": lambda rank: named_collectives.all_reduce(torch.ones(3).to([torch.float32, torch.int32][rank]), "x"),
    "shape": lambda rank: named_collectives.all_reduce(torch.ones(3 + rank), "x"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_what_is_compared(monkeypatch: pytest.MonkeyPatch, difference: str) -> None:
    monkeypatch.setenv(named_collectives.CHECK_VARIABLE, "1")

    def check() -> None:
        with pytest.raises(ValueError, match="the ranks must agree on the next collective: rank 0 has"):
            DIFFERENCES[difference](dist.get_rank())

    run_ranks(check, 2)
