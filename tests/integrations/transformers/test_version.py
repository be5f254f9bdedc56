"""The versions of transformers that are accepted and refused."""

import re
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("transformers")

from maxmoe.integrations.transformers import _version


@pytest.mark.parametrize("installed", ["4.57.6", "5.19.0", "5.9.0.dev0", None, "5.20.0", "5.100.1", "6.0.0rc1"])
def test_an_old_or_missing_transformers_is_refused(installed: str | None) -> None:
    result = {"return_value": installed} if installed else {"side_effect": metadata.PackageNotFoundError}
    message = rf"transformers>=5.20,<6, got {re.escape(installed)}" if installed else r"got none. Run: pip install 'tr"
    is_taken = installed in ("5.20.0", "5.100.1", "6.0.0rc1")
    refused = nullcontext() if is_taken else pytest.raises(ImportError, match=message)
    with patch.object(metadata, "version", **result), refused:
        _version.check_version()


def test_the_extra_asks_for_the_tested_versions() -> None:
    pyproject = Path(__file__).parents[3] / "pyproject.toml"
    assert f'transformers = ["{_version.TESTED}"]' in pyproject.read_text()
