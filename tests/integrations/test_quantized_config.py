"""What the config beside a checkpoint says of its quantization: compared with the tensors, and checked."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from maxmoe.convert.quantized_tensors import ConfigFormat
from maxmoe.quantization import quantize
from support.quantized_checkpoints import FAMILIES

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from support.quantized_checkpoint_files import read, written

each_kind = pytest.mark.parametrize("kind", FAMILIES)

CONFIGS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8_block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    },
}


@each_kind
def test_config(kind: str, tmp_path: Path) -> None:
    file = written(tmp_path, kind)
    for name, quantization in (*CONFIGS.items(), ("none", None)):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
        if name in (kind.split()[0], "none"):
            read(tmp_path, kind)
            continue
        words = (
            f"(?=.*experts.*must be quantized as {name},)(?=.*config.json says, got {kind.split()[0]})(?=.*{file.name})"
        )
        with pytest.raises(ValueError, match=words):
            read(tmp_path, kind)


def test_group_size_of_config(tmp_path: Path) -> None:
    written(tmp_path, "int4")
    text = json.dumps({"quantization_config": CONFIGS["int4"]}).replace('"group_size": 32', '"group_size": 64')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"int4, with a scale for 1 x 64 weights, .* says, got int4, .* 1 x 32"):
        read(tmp_path, "int4")


def test_group_size_of_whole_rows(tmp_path: Path) -> None:
    """compressed-tensors writes -1 for one scale per row."""
    config = {"weights": {"num_bits": 4, "type": "int", "group_size": -1}}
    text = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": config}}}
    (tmp_path / "config.json").write_text(json.dumps(text))
    ConfigFormat(tmp_path).check("weight", quantize(torch.randn(1, 64, 32), "int4", group_size=64))


GROUP: dict[str, Any] = {"quant_method": "compressed-tensors"}
WRONG_CONFIGS: list[tuple[str, Any, str]] = [
    ("int4", "", "config.json must be a JSON file: Expecting value"),
    ("int4", [], "config.json: the file must be a JSON object, got []"),
    ("int4", {"text_config": [1]}, "config.json: text_config must be a JSON object, got [1]"),
    ("int4", [1], "config.json: quantization_config must be a JSON object, got [1]"),
    ("int4", GROUP, "config.json: config_groups must have weights with type and num_bits, got {}"),
    ("int4", {**GROUP, "config_groups": [1]}, "config.json: config_groups must be a JSON object, got [1]"),
    ("int4", {**GROUP, "config_groups": {"a": {}}}, "must have weights with type and num_bits, got {'a': {}}"),
    ("int4", {**GROUP, "config_groups": {"a": {"weights": None}}}, "must have weights with type and num_bits, got {"),
    *(
        (
            "fp8_block",
            {"quant_method": "fp8", "weight_block_size": size},
            f"config.json: weight_block_size must be the size of a block, got {size}",
        )
        for size in (128, [64])
    ),
    (
        "fp8_block",
        {"quant_method": "fp8", "weight_block_size": [64, 128]},
        "must be quantized as fp8_block, with a scale for 64 x 128 weights, as ",
    ),
]


@pytest.mark.parametrize(("kind", "config", "message"), WRONG_CONFIGS, ids=[message for _, _, message in WRONG_CONFIGS])
def test_wrong_configs(kind: str, config: Any, message: str, tmp_path: Path) -> None:
    written(tmp_path, kind)
    is_whole = not config or "text_config" in config
    text = config if config == "" else json.dumps(config if is_whole else {"quantization_config": config})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, kind)
