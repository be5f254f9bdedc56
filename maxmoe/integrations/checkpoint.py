"""Reading and writing of Mixture-of-Experts layers in the safetensors checkpoints of published models.

Weights are copied one expert at a time, so that the additional memory does not depend on the size of the checkpoint.
"""

import json
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from maxmoe.nn import MoE
from maxmoe.presets.families import FAMILIES, Family
from maxmoe.presets.layouts import Held, Layout, check_tensors, listed

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@torch.no_grad()
def read_checkpoint(path: str | Path, layers: Mapping[str, MoE], family: str) -> None:
    """Read the weights of layers from a checkpoint, with one tensor per expert or with stacked experts.

    Args:
        path: safetensors file, or folder with the files of one model.
        layers: layers by the name of their block in the decoder, such as ``{"model.layers.3": layer}``. They are
            overwritten, in their dtype.
        family: `model_type` in the config of the model, such as "mixtral".

    Raises:
        ValueError: for an unknown family, for a file that is not in safetensors format, and for tensors with other
            names or shapes than those of the layers.
    """
    known = _family(family)
    with ExitStack() as stack:
        files = _open(Path(path), stack)
        for block, layer in layers.items():
            in_block = _below(f"{block}.", files)
            if not in_block:
                raise ValueError(f"{path} must have keys that begin with {block}., got {listed(sorted(files))}")
            _read_layer(f"{path} as {family}", block, layer, in_block, known)


@torch.no_grad()
def write_checkpoint(path: str | Path, layers: Mapping[str, MoE], family: str, *, stacked: bool = False) -> None:
    """Write the weights of layers with the names and layout of published checkpoints.

    Args:
        path: safetensors file, which is overwritten.
        layers: layers by the name of their block in the decoder, such as ``{"model.layers.3": layer}``.
        family: `model_type` in the config of the model, such as "mixtral".
        stacked: write all experts in one tensor, with the names of the models in transformers.

    Raises:
        ValueError: for an unknown family, and for a layer with parameters that the family lacks.
    """
    layout = _family(family).block if stacked else _family(family).checkpoint
    tensors: dict[str, Held] = {}
    for block, layer in layers.items():
        of_layer = layout.tensors(_state(block, layer))
        tensors |= {f"{block}.{layout.module}.{key}": held for key, held in of_layer.items()}
    # In the order of the safetensors library, in which every tensor is aligned to its dtype.
    order = sorted(tensors, key=lambda key: (-tensors[key].parameters[0].itemsize, key))
    with Path(path).open("wb") as file:
        _write_header(file, {key: tensors[key] for key in order})
        for key in order:
            for _, parameters in _experts(tensors[key]):
                tensor = tensors[key].entry.join(parameters)
                file.write(tensor.cpu().view(torch.uint8).numpy().data)


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def _state(block: str, layer: MoE) -> dict[str, Tensor]:
    state = layer.state_dict()
    empty = [name for name, tensor in state.items() if tensor.is_meta]
    if empty:
        raise ValueError(f"{block}: {empty[0]} must have memory, got the meta device; call layer.to_empty first")
    return state


def _open(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Open all files of a checkpoint, and return the file of every key."""
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{path} must be a safetensors file or a folder of them, got a folder without any")
    files: dict[str, Any] = {}
    for each in paths:
        file = stack.enter_context(_open_file(each))
        keys = file.keys()
        for key in keys:
            if key in files:
                raise ValueError(f"{path}: {key} must be in one file, it is in two, the second is {each.name}")
            files[key] = file
    return files


def _open_file(path: Path) -> safe_open:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO waits for a writer
        raise ValueError(f"{path} must be a safetensors file")
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file: {error}") from error


def _below(base: str, files: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(base): file for key, file in files.items() if key.startswith(base)}


def _read_layer(where: str, block: str, layer: MoE, in_block: Mapping[str, Any], family: Family) -> None:
    layout = _layout_of(in_block, family, f"{where}: {block}")
    base = f"{block}.{layout.module}"
    files = _below(f"{layout.module}.", in_block)
    slices = {key: file.get_slice(f"{base}.{key}") for key, file in files.items()}
    tensors = layout.tensors(_state(block, layer))
    _check(f"{where}: {base}", slices, tensors)
    for key, held in tensors.items():
        for index, parameters in _experts(held):
            for view, parameter in zip(held.entry.views(slices[key][index]), parameters, strict=True):
                parameter.copy_(view)


def _layout_of(in_block: Mapping[str, Any], family: Family, where: str) -> Layout:
    """Return the layout whose expert names are in the checkpoint: the published one, or the stacked one in memory."""

    def has(layout: Layout) -> bool:
        ends = [f"{layout.module}.{entry.key}".split("{expert}") for entry in layout.entries if entry.is_of_experts]
        return any(key.startswith(end[0]) and key.endswith(end[-1]) for end in ends for key in in_block)

    for layout in (family.checkpoint, family.block):
        if has(layout):
            return layout
    others = [name for name, other in FAMILIES.items() if has(other.checkpoint) or has(other.block)]
    found = f"the names are those of {', '.join(others)}" if others else f"got {listed(sorted(in_block))}"
    wanted = next(entry.key for entry in family.checkpoint.entries if entry.is_of_experts)
    raise ValueError(f"{where} must have {family.checkpoint.module}.{wanted}; {found}")


def _check(where: str, slices: Mapping[str, Any], tensors: Mapping[str, Held]) -> None:
    check_tensors(where, {key: part.get_shape() for key, part in slices.items()}, tensors)
    for key, part in slices.items():
        if part.get_dtype() not in _DTYPES.values():
            kinds = ", ".join(_DTYPES.values())
            raise ValueError(f"{where}: {key} must be of {kinds}, got {part.get_dtype()}; dequantise it first")


def _experts(held: Held) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yield the index and the parameters of each expert in a stack, or of a whole tensor that is none."""
    if not held.entry.is_stack:
        yield ..., held.parameters
        return
    for expert in range(len(held.parameters[0])):
        yield expert, [parameter[expert] for parameter in held.parameters]


def _write_header(file: BinaryIO, tensors: Mapping[str, Held]) -> None:
    """Write the length of the header in 8 bytes, then the header, padded to 8 bytes.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for key, held in tensors.items():
        dtype = held.parameters[0].dtype
        end = begin + held.shape.numel() * dtype.itemsize
        header[key] = {"dtype": _DTYPES[dtype], "shape": list(held.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
