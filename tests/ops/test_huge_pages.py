"""Large results lie in memory for which huge pages were asked."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from maxmoe import ops

MIB = 2**20


def asks_for_huge_pages(tensor: Tensor) -> bool:
    """What the system says of the mapping that holds the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(address, 16) for address in name.split("-"))
            is_inside = begin <= middle < end
        elif is_inside and name == "VmFlags:":
            return "hg" in values
    raise AssertionError(f"no mapping holds {middle:x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no transparent huge pages"
)
@pytest.mark.parametrize("size", [4 * MIB, 33 * MIB])
def test_large_results(size: int) -> None:
    rows = torch.ones(size // 1024, 256)
    index = torch.arange(len(rows)).flip(0)
    assert asks_for_huge_pages(ops.ragged_gather(rows, index))
    plan = ops.ragged_plan(torch.zeros(len(rows), 1, dtype=torch.int64), 1)
    assert asks_for_huge_pages(ops.ragged_sort(rows, plan))
    assert asks_for_huge_pages(ops.gmm(rows, torch.ones(1, 256, 256), plan.group_sizes))
