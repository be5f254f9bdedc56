"""How the operators run in tests."""

import pytest
import torch


@pytest.fixture
def num_threads() -> int:
    """Run the tests of operators with torch's default number of threads, because kernels divide work among threads."""
    return torch.get_num_threads()
