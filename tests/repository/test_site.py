"""The site: it has every public name and message."""

import importlib
import pkgutil
import re

import pytest

import maxmoe
from support.documented import DOCS, docs_module

TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()
(OF_PYTORCH,) = re.findall(r"^## Messages of PyTorch$.*?(?=^## )", TROUBLESHOOTING, re.MULTILINE | re.DOTALL)
HEADINGS = re.findall(r"^### `(.*)`$", TROUBLESHOOTING.replace(OF_PYTORCH, ""), re.MULTILINE)


def packages() -> list[str]:
    """Packages with public names."""
    pytest.importorskip("transformers")
    found = [module.name for module in pkgutil.walk_packages(maxmoe.__path__, "maxmoe.") if module.ispkg]
    return [
        "maxmoe",
        *(name for name in found if hasattr(importlib.import_module(name), "__all__") and "._" not in name),
    ]


MODULES = (
    "maxmoe.convert.checkpoint",
    "maxmoe.convert.quantized_merge",
    "maxmoe.convert.saliency",
    "maxmoe.convert.surgery",
    "maxmoe.integrations.lightning",
)  # with a page too


def test_every_package_has_a_page() -> None:
    pages = {path.stem for path in (DOCS / "api").glob("*.rst")}
    assert pages == {*packages(), *MODULES}
    for page in pages:
        assert f".. automodule:: {page}\n" in (DOCS / f"api/{page}.rst").read_text()
    text = (DOCS / "extensions/docstrings.py").read_text()  # which looks for names that the pages lack
    (listed,) = re.findall(r"^PACKAGES = \((.*?)^\)", text, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'"(.*?)"', listed)) == pages


def test_every_explained_message_exists() -> None:
    pytest.importorskip("sphinx", reason="make docs installs it")
    raised = [message for message, _ in docs_module("extensions/messages").messages()]
    for heading in HEADINGS:
        pattern = ".*".join(re.escape(part) for part in heading.split("..."))
        assert any(re.search(pattern, message) for message in raised), heading
    assert len(HEADINGS) > 50
