"""`python -m maxmoe adapters`: files of PEFT, and what `export_adapter` writes, converted into each other."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model

from maxmoe.adapters import share_outer_factors, wrappers_of
from maxmoe.cli.main import main
from maxmoe.convert.adapter_conversion import TARGETS
from maxmoe.integrations.transformers import export_adapter
from support.adapted import trained
from support.replaced_models import IDS, small_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),  # PEFT looks for modules
]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# Ranks and scales that differ between modules: 2 and 3 / 2 elsewhere.
OTHER_RANKS: dict[str, Any] = {
    "rank_pattern": {"o_proj": 5, "experts.down_proj": 3},
    "alpha_pattern": {"o_proj": 9, "experts.down_proj": 1},
}


def save(folder: Path, preset: str = "mixtral", targets: list[str] = EXPERTS, **options: Any) -> PeftModel:
    """Save an adapter that is not zero with PEFT in "peft", and the config of its model in "base"."""
    torch.manual_seed(3)
    settings = {"r": 2, "lora_alpha": 3, "init_lora_weights": False, "target_modules": ["o_proj"]} | options
    model = small_model(preset).eval()
    model.config.save_pretrained(folder / "base")
    model = get_peft_model(model, LoraConfig(target_parameters=targets, **settings))
    model.save_pretrained(folder / "peft")
    return model


def convert(folder: Path, source: str, target: str, out: str | None = None) -> dict[str, Tensor]:
    """Convert the adapter in a folder; return the tensors of the new file."""
    paths = [str(folder / name) for name in (source, "base", out or target)]
    assert main(["adapters", paths[0], "--model", paths[1], "--to", target, "--out", paths[2]]) == 0
    return load_file(folder / (out or target) / "adapter_model.safetensors")


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == each.dtype and found[name].equal(each) for name, each in expected.items())


def config_of(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return fields


@pytest.mark.parametrize(
    ("preset", "targets", "options"),
    [
        ("mixtral", ("vllm", "vllm-stacked", "sglang"), OTHER_RANKS),
        ("qwen3_moe", ("vllm",), {"use_rslora": True, "target_parameters": EXPERTS[1:]}),
        ("nemotron_h", ("vllm",), {"target_modules": ["shared_experts.up_proj"]}),
        ("gpt_oss", ("vllm-stacked",), {}),
    ],
)
def test_from_files_alone_as_from_the_model(
    preset: str, targets: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    """The files of `export_adapter`, whose logits test_served_adapters.py compares."""
    names = options.pop("target_parameters", None) or (EXPERTS if preset != "nemotron_h" else ["experts.up_proj", EXPERTS[1]])
    model = save(tmp_path, preset, names, **options)
    for target in targets:
        export_adapter(model, tmp_path / "exported", layout=TARGETS[target])  # type: ignore[arg-type]
        found = convert(tmp_path, "peft", target)
        assert_same(found, load_file(tmp_path / "exported/adapter_model.safetensors"))
        assert config_of(tmp_path / target) == config_of(tmp_path / "exported")


def test_round_trips_of_every_pair(tmp_path: Path) -> None:
    """All layouts hold these factors: of one rank and scale, with one outer factor for all experts."""
    model = save(tmp_path, r=4, lora_alpha=6, init_lora_weights=True)
    share_outer_factors(model)
    for factor in trained(model).values():
        nn.init.normal_(factor, std=0.3)
    model.save_pretrained(tmp_path / "peft")
    files = {target: convert(tmp_path, "peft", target, f"first {target}") for target in TARGETS}
    for one, other in itertools.permutations(TARGETS, 2):
        found = convert(tmp_path, f"first {one}", other, "there")
        assert_same(found, files[other])
        assert_same(convert(tmp_path, "there", one, "back"), files[one])
        if "peft" not in one:
            assert config_of(tmp_path / "back") == config_of(tmp_path / f"first {one}")
    assert files["sglang"].keys() != files["vllm-shared"].keys()
    for target, outer in (("sglang", ("gate_up_proj.lora_A", "down_proj.lora_B")), ("vllm-shared", ("w1.lora_A", "w3.lora_A", "w2.lora_B"))):
        shared = {name for name, each in files[target].items() if "experts" in name and len(each) == 1}
        assert len(shared) == 2 * len(outer) and all(any(end in name for end in outer) for name in shared)
    expected = model(input_ids=IDS).logits
    loaded = PeftModel.from_pretrained(small_model("mixtral").eval(), tmp_path / "back" if one == "peft" else tmp_path / "first peft")
    assert loaded(input_ids=IDS).logits.equal(expected) or torch.allclose(loaded(input_ids=IDS).logits, expected, rtol=1e-13, atol=1e-13)
