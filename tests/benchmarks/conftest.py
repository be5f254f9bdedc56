"""How the benchmarks run in tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """On a busy machine two threads wait for each other most of the time."""
    torch.set_num_threads(1)
