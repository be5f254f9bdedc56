"""Files of small checkpoints with quantized experts, and layers that are read from them."""

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from maxmoe import MoE
from maxmoe.convert.checkpoint import read_checkpoint
from support.quantized_checkpoints import BLOCK, FAMILIES, layer_for, tensors_of


def written(path: Path, kind: str, **changes: Tensor | None) -> Path:
    """Write a checkpoint; tensors whose names end with a key are replaced, or left out."""
    tensors = tensors_of(kind)
    for end, tensor in changes.items():
        key = next((key for key in tensors if key.endswith(end)), end)
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    file = path / "model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    return file


def read(path: Path, kind: str, layer: MoE | None = None) -> MoE:
    layer = layer_for(kind) if layer is None else layer
    read_checkpoint(path, {BLOCK: layer}, FAMILIES[kind])
    return layer
