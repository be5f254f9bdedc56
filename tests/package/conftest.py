"""A Python that has imported torch, but not maxmoe."""

from collections.abc import Iterator

import pytest

from support.torch_forks import TorchForks


@pytest.fixture(scope="session")
def torch_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchForks]:
    with TorchForks(tmp_path_factory.mktemp("forks")) as forks:
        yield forks
