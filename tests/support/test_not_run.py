"""The end of a run says how to run the tests that it left out."""

import pytest

from support.not_run import explained


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("could not import 'trl': No module named 'trl'", "trl is missing: pip install -e '.[trainers]'"),
        (
            "could not import 'jax': No module named 'jax'",
            "jax is missing: pip install jax",
        ),
        (
            "could not import 'torch.utils.tensorboard': No module named 'tensorboard'",
            "tensorboard is missing: pip install -e '.[logging]'",
        ),
        ("memory is kept on Linux", "memory is kept on Linux"),
    ],
)
def test_a_missing_library_is_explained(reason: str, expected: str) -> None:
    assert explained(reason) == expected
