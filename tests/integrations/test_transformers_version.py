"""The versions of transformers that are accepted and refused."""

import re
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from maxmoe.integrations.transformers import _version
from support.programs import python

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("installed", ["4.57.6", "5.19.0", "5.9.0.dev0"])
def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    with pytest.raises(ImportError, match=rf"transformers>=5.20,<6, got {re.escape(installed)}"):
        _version.check_version()


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ImportError, match=r"got none. Run: pip install 'transformers>=5.20,<6'"):
        _version.check_version()


@pytest.mark.parametrize("installed", ["5.20.0", "5.23.0", "5.100.1", "6.0.0rc1"])
def test_a_newer_transformers_is_taken(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    _version.check_version()


@pytest.mark.slow
def test_without_the_import_the_implementation_is_not_known() -> None:
    """The error that docs/troubleshooting.md explains."""
    code = """
import maxmoe
from transformers import MixtralConfig, MixtralForCausalLM
config = MixtralConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, vocab_size=8)
try:
    MixtralForCausalLM(config).set_experts_implementation("maxmoe")
except ValueError as error:
    print(error)
"""
    assert '`experts_implementation="maxmoe"` is not supported' in python(code).stdout


def test_the_extra_asks_for_the_tested_versions() -> None:
    assert f'transformers = ["{_version.TESTED}"]' in (ROOT / "pyproject.toml").read_text()
