"""Models of gpt-oss with experts in MXFP4, random or from a published checkpoint, and their adapters."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

import maxmoe
from maxmoe.convert.checkpoint import read_checkpoint
from maxmoe.presets import from_transformers
from maxmoe.quantization import QuantizedWeight
from pretraining import InputError

FAMILY, FORMAT = "gpt_oss", "mxfp4"

# The layer types and all other sizes are the defaults of GptOssConfig.
PRESETS: dict[str, dict[str, int]] = {
    "small": {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    "gpt_oss_20b": {"num_hidden_layers": 24, "num_local_experts": 32},
}

# Standard deviation of the random weights, as in published models. The standard deviation of random codes of E2M1 is
# 2.9; the scale 2^-7 of E8M0 makes it 0.023.
_DEVIATION, _SCALE = 0.02, 127 - 7


def random_config(preset: str, num_layers: int | None) -> GptOssConfig:
    """Return the config of a preset, with another number of layers if one is given."""
    sizes: dict[str, Any] = dict(PRESETS[preset])
    sizes["num_hidden_layers"] = num_layers or sizes["num_hidden_layers"]
    return GptOssConfig(**sizes)


def checkpoint_config(folder: Path, num_layers: int | None) -> GptOssConfig:
    """Return the config in the folder of a published model, cut after a number of layers if one is given.

    Raises:
        InputError: if the folder has no config of a model of gpt-oss.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"--checkpoint {folder}: there is no file {path}")
    values, _ = GptOssConfig.get_config_dict(folder)
    if values.get("model_type") != FAMILY:
        raise InputError(
            f"--checkpoint {folder}: model_type in config.json must be {FAMILY}, got {values.get('model_type')}"
        )
    values.pop("quantization_config", None)  # the experts are quantized by this library
    published = values["num_hidden_layers"]
    if num_layers is not None:
        if num_layers > published:
            raise InputError(f"--num-layers {num_layers}: the model in {folder} has {published}")
        values["num_hidden_layers"] = num_layers
        values["layer_types"] = values["layer_types"][:num_layers]
    return GptOssConfig.from_dict(values)


def empty_model(config: GptOssConfig) -> GptOssForCausalLM:
    """Return a frozen model in bfloat16 on the meta device, with buffers on the CPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, experts_implementation="maxmoe", dtype=torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.requires_grad_(False)


@torch.no_grad()
def random_model(config: GptOssConfig, seed: int) -> GptOssForCausalLM:
    """Return a frozen model with random weights. The codes of the experts are drawn, so that nothing is quantized."""
    model = empty_model(config)
    maxmoe.quantize_experts(model, FORMAT)
    generator = torch.Generator().manual_seed(seed)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = torch.empty_like(parameter, device="cpu")
            if name.endswith("codes"):
                value.view(torch.int64).random_(-(2**63), None, generator=generator)  # eight bytes a draw
            elif name == "scales":
                value.fill_(_SCALE)
            elif parameter.dim() > 1 and "bias" not in name:
                value.normal_(std=_DEVIATION, generator=generator)
            else:
                value.fill_(1 if path.endswith("norm") else 0)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    return model


@torch.no_grad()
def published_model(config: GptOssConfig, folder: Path) -> GptOssForCausalLM:
    """Return a frozen model with the weights of a published checkpoint, its experts in MXFP4 as they are there.

    Raises:
        InputError: if tensors are missing, or have other shapes or formats.
    """
    model = empty_model(config)
    try:
        for name, block in sparse_blocks(model):
            _read_block(folder, name, block)
        _read_others(folder, model)
    except (ValueError, OSError, SafetensorError) as error:
        raise InputError(f"--checkpoint {folder}: {str(error) or type(error).__name__}") from error
    return model


def sparse_blocks(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the sparse block of each layer with the name of the layer."""
    for index, layer in enumerate(model.model.layers):
        yield f"model.layers.{index}", layer.mlp


def _read_block(folder: Path, name: str, block: Any) -> None:
    """Read router and experts of a layer through a layer of maxmoe."""
    layer = maxmoe.MoE(from_transformers(block.experts.config), device="meta", dtype=torch.bfloat16).requires_grad_(
        False
    )
    maxmoe.quantize_experts(layer, FORMAT)
    layer.to_empty(device="cpu")
    read_checkpoint(folder, {name: layer}, FAMILY)
    layer.to_transformers(block)


def _read_others(folder: Path, model: GptOssForCausalLM) -> None:
    """Read everything that is not on the CPU yet: embeddings, attention and norms."""
    missing = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(missing.keys() & set(file.keys())):
                _set(model, name, missing.pop(name), file.get_tensor(name))
    if missing:
        raise ValueError(f"it has no tensor {next(iter(missing))}")


def _set(model: nn.Module, name: str, parameter: Tensor, value: Tensor) -> None:
    if value.shape != parameter.shape:
        raise ValueError(f"{name} must have shape {tuple(parameter.shape)}, got {tuple(value.shape)}")
    path, _, last = name.rpartition(".")
    copy = value.to(parameter.dtype, copy=True)  # the file is mapped to memory until its last tensor is freed
    setattr(model.get_submodule(path), last, nn.Parameter(copy, requires_grad=False))


@torch.no_grad()
def dequantize_experts(model: nn.Module) -> None:
    """Replace quantized experts by bfloat16 weights of the same values."""
    for module in model.modules():
        for name, weight in list(module.named_children()):
            if isinstance(weight, QuantizedWeight):
                setattr(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))


def expert_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the matrices of all experts, and their bytes in bfloat16."""
    stacks = [
        weight
        for _, block in sparse_blocks(model)
        for weight in (*block.experts.children(), *block.experts.parameters(recurse=False))
        if isinstance(weight, QuantizedWeight) or weight.dim() == 3
    ]
    return sum(stack.nbytes for stack in stacks), sum(stack.numel() * torch.bfloat16.itemsize for stack in stacks)
