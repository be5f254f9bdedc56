"""The versions of transformers that are accepted and refused."""

import re
from importlib import metadata
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("transformers")

from maxmoe.integrations.transformers import _version


@pytest.mark.parametrize("installed", ["4.57.6", "5.19.0", "5.9.0.dev0", None])
def test_an_old_or_missing_transformers_is_refused(installed: str | None) -> None:
    result = {"return_value": installed} if installed else {"side_effect": metadata.PackageNotFoundError}
    message = rf"transformers>=5.20,<6, got {re.escape(installed)}" if installed else r"got none. Run: pip install 'tr"
    with patch.object(metadata, "version", **result), pytest.raises(ImportError, match=message):
        _version.check_version()


@pytest.mark.parametrize("installed", ["5.20.0", "5.23.0", "5.100.1", "6.0.0rc1"])
def test_a_newer_transformers_is_taken(installed: str) -> None:
    with patch.object(metadata, "version", return_value=installed):
        _version.check_version()


def test_the_extra_asks_for_the_tested_versions() -> None:
    pyproject = Path(__file__).parents[3] / "pyproject.toml"
    assert f'transformers = ["{_version.TESTED}"]' in pyproject.read_text()
