"""The site: it has every public name and message."""

import copy
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import maxmoe
from maxmoe.sharding import Mesh
from support.docs_module import DOCS, docs_module
from support.run_ranks import run_ranks

TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()
(OF_PYTORCH,) = re.findall(r"^## Messages of PyTorch$.*?(?=^## )", TROUBLESHOOTING, re.MULTILINE | re.DOTALL)
HEADINGS = re.findall(r"^### `(.*)`$", TROUBLESHOOTING.replace(OF_PYTORCH, ""), re.MULTILINE)
TORCH_HEADINGS = re.findall(r"^### `(.*)`$", OF_PYTORCH, re.MULTILINE)


@pytest.fixture(scope="module")
def messages() -> ModuleType:
    pytest.importorskip("sphinx", reason="make docs installs it")
    return docs_module("extensions/messages")


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


def test_every_explained_message_exists(messages: ModuleType) -> None:
    raised = [message for message, _ in messages.messages()]
    for heading in HEADINGS:
        pattern = ".*".join(re.escape(part) for part in heading.split("..."))
        assert any(re.search(pattern, message) for message in raised), heading
    assert len(HEADINGS) > 50


def load_after_parallelize() -> None:
    layer = moe_layer()
    state = layer.state_dict()
    maxmoe.parallelize(layer, Mesh({"expert": -1}), "ep-as-dp").load_state_dict(state)


def fully_shard_after_parallelize() -> None:
    layer = maxmoe.parallelize(moe_layer(), Mesh({"expert": -1}), "ep-as-dp")
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))


def copy_on_fsdp() -> None:
    copy.deepcopy(maxmoe.parallelize(moe_layer(), Mesh({"fsdp": 2}), "pure-fsdp"))


def moe_layer() -> maxmoe.MoE:
    return maxmoe.MoE(maxmoe.MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2))


X = torch.zeros(2, 3, 8)
MISTAKES: list[Callable[[], object]] = [
    lambda: moe_layer()(X) + X,  # type: ignore[operator]
    lambda: X + moe_layer()(X),
    lambda: torch.nn.Sequential(moe_layer(), torch.nn.Linear(8, 8))(X),
    lambda: run_ranks(load_after_parallelize, 1),
    lambda: run_ranks(fully_shard_after_parallelize, 1),
    lambda: run_ranks(copy_on_fsdp, 2),
]


@pytest.mark.parametrize(("heading", "mistake"), list(zip(TORCH_HEADINGS, MISTAKES, strict=True)))
def test_pytorch_raises_what_is_explained(heading: str, mistake: Callable[[], object]) -> None:
    with pytest.raises((TypeError, RuntimeError), match=re.escape(heading)):
        mistake()


def test_conf_names_the_version_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert docs_module("conf").release == maxmoe.__version__
