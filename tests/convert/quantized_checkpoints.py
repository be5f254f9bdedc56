"""Small checkpoints with quantized experts, in the layouts that are published, and their weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from maxmoe import MoE, MoEConfig, presets, quantize_experts
from maxmoe.convert.checkpoint import read_checkpoint, write_checkpoint

BLOCK = "model.layers.3"
Tensors = dict[str, Tensor]


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def mxfp4(rows: int, columns: int) -> Tensors:
    """gpt-oss: all experts in one tensor."""
    return {
        "_blocks": _bytes(4, rows, columns // 32, 16),
        "_scales": torch.randint(110, 125, (4, rows, columns // 32), dtype=torch.uint8),
    }


def nvfp4(rows: int, columns: int) -> Tensors:
    """ModelOpt: one expert."""
    scales = torch.randint(1, 127, (rows, columns // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return {"": _bytes(rows, columns // 2), "_scale": scales, "_scale_2": torch.rand(()) / 1e4}


def packed_nvfp4(rows: int, columns: int) -> Tensors:
    """compressed-tensors, format nvfp4-pack-quantized: one expert; scales are divided by the last number."""
    tensors = nvfp4(rows, columns)
    return {"_packed": tensors[""], "_scale": tensors["_scale"], "_global_scale": 1e4 / (1 + torch.rand(1))}


def stacked_nvfp4(rows: int, columns: int) -> Tensors:
    """ModelOpt, gpt-oss: all experts in one tensor with the dims in, out."""
    experts = [nvfp4(rows, columns) for _ in range(4)]
    codes, scales, numbers = (torch.stack([expert[end] for expert in experts]) for end in experts[0])
    return {"": codes.mT, "_weight_scale": scales.mT, "_weight_scale_2": numbers}


def fp8_block(rows: int, columns: int) -> Tensors:
    """DeepSeek-V3: one expert."""
    codes = _bytes(rows, columns)
    codes[codes % 128 == 127] = 0
    return {"": codes.view(torch.float8_e4m3fn), "_scale_inv": torch.rand(-(-rows // 128), -(-columns // 128)) / 100}


def int4(rows: int, columns: int, *, zeros: bool = False) -> Tensors:
    """compressed-tensors, format pack-quantized: one expert, groups of 32."""
    tensors = {
        "_packed": packed(torch.randint(-8, 8, (rows, columns))),
        "_scale": (torch.rand(rows, columns // 32) / 100).bfloat16(),
        "_shape": torch.tensor([rows, columns]),
    }
    if zeros:
        tensors["_zero_point"] = packed(torch.randint(-8, 8, (columns // 32, rows))).mT.contiguous()
    return tensors


def packed(integers: Tensor) -> Tensor:
    """Eight integers in [-8, 8) in an int32, each plus 8, the first one in the lowest bits."""
    padded = torch.nn.functional.pad(integers + 8, (0, -integers.shape[1] % 8)).unflatten(1, (-1, 8))
    words = sum(padded[..., place].long() << 4 * place for place in range(8))
    assert isinstance(words, Tensor)
    return words.to(torch.int32)  # wraps


def unpacked(words: Tensor, columns: int) -> Tensor:
    """The inverse of `packed`."""
    places = [(words.long() >> 4 * place & 15) - 8 for place in range(8)]
    return torch.stack(places, dim=-1).flatten(1)[:, :columns]


# The family, and the tensors of a matrix: of all experts in gpt-oss, else of one.
KINDS: dict[str, tuple[str, Callable[[int, int], Tensors]]] = {
    "mxfp4": ("gpt_oss", mxfp4),
    "nvfp4": ("deepseek_v3", nvfp4),
    "nvfp4 packed": ("kimi_k2", packed_nvfp4),
    "nvfp4 stacked": ("gpt_oss", stacked_nvfp4),
    "fp8_block": ("deepseek_v3", fp8_block),
    "int4": ("kimi_k2", int4),
    "int4 with zeros": ("kimi_k2", partial(int4, zeros=True)),
}
FAMILIES = {kind: family for kind, (family, _) in KINDS.items()}


def config_of(kind: str) -> MoEConfig:
    """Sizes that 32 and 128 divide, because transformers' own code needs it."""
    options: dict[str, Any] = {"num_groups": 2, "top_k_groups": 1} if FAMILIES[kind] == "deepseek_v3" else {}
    make = getattr(presets, FAMILIES[kind])
    return make(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, **options)


def layer_for(kind: str) -> MoE:
    """A layer with quantized experts on the meta device."""
    layer = MoE(config_of(kind), dtype=torch.float32).requires_grad_(False)
    for name, parameter in layer.experts.named_parameters():
        if parameter.dim() == 3:
            setattr(layer.experts, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))
    quantize_experts(layer.experts, kind.split()[0])
    return layer


def tensors_of(kind: str) -> Tensors:
    """All tensors of one layer, by their names in the checkpoint."""
    torch.manual_seed(0)
    D, F, (family, make) = 256, 128, KINDS[kind]
    layer = MoE(config_of(kind))
    for value in layer.state_dict().values():
        value.normal_()
    with TemporaryDirectory() as folder:
        write_checkpoint(Path(folder, "ours"), {BLOCK: layer}, family)
        tensors = load_file(Path(folder, "ours"))
    tensors = {key: tensor for key, tensor in tensors.items() if ".experts." not in key or key.endswith("_bias")}
    matrices = [("gate_up_proj", 2 * F, D), ("down_proj", D, F)]
    if family != "gpt_oss":
        names = ("gate_proj", F, D), ("up_proj", F, D), ("down_proj", D, F)
        matrices = [(f"{expert}.{name}.weight", *sizes) for expert in range(4) for name, *sizes in names]
    for name, *sizes in matrices:
        tensors |= {f"{BLOCK}.mlp.experts.{name}{end}": part.contiguous() for end, part in make(*sizes).items()}
    return tensors


def with_changes(tensors: Tensors, changes: dict[str, Tensor | None]) -> Tensors:
    """Replace tensors whose names end with a key, or leave them out; other keys are names of new ones."""
    for end, tensor in changes.items():
        key = next((key for key in tensors if key.endswith(end)), end)
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    return tensors


def written(path: Path, kind: str, **changes: Tensor | None) -> Path:
    """Write a checkpoint."""
    file = path / "model.safetensors"
    save_file(with_changes(tensors_of(kind), changes), file, {"format": "pt"})
    return file


def read(path: Path, kind: str, layer: MoE | None = None) -> MoE:
    layer = layer_for(kind) if layer is None else layer
    read_checkpoint(path, {BLOCK: layer}, FAMILIES[kind])
    return layer
