"""How the operators run in tests."""

import pytest
import torch


@pytest.fixture
def num_threads() -> int:
    """As many as a user has: the kernels share their work among them."""
    return torch.get_num_threads()
