"""Reading and writing the safetensors checkpoints of published models, the part of the Mixture-of-Experts layers.

One expert at a time: beside the layers there is memory for one expert, whatever the size of the checkpoint.
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
    """Read the weights of layers from a checkpoint, with a tensor for each expert or all experts in one.

    Args:
        path: a safetensors file, or a folder with the files of one model.
        layers: by the name of the decoder's block they are in, such as ``{"model.layers.3": layer}``; their memory is
            written, in their dtype.
        family: the `model_type` in the config of the model, as "mixtral".

    Raises:
        ValueError: if the family is not known, for a file that is not of safetensors, and if the tensors are not those
            of the layers.
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
    """Write the weights of layers as a published checkpoint has them.

    Args:
        path: of the safetensors file, which is overwritten.
        layers: by the name of the decoder's block they are in, such as ``{"model.layers.3": layer}``.
        family: the `model_type` in the config of the model, as "mixtral".
        stacked: all experts in one tensor, named as in the models of transformers; otherwise as published.

    Raises:
        ValueError: if the family is not known, or a layer has parameters that the family has not.
    """
    layout = _family(family).block if stacked else _family(family).checkpoint
    tensors: dict[str, Held] = {}
    for block, layer in layers.items():
        of_layer = layout.tensors(_state(block, layer))
        tensors |= {f"{block}.{layout.module}.{key}": held for key, held in of_layer.items()}
    # As the format's own library orders them: then every tensor is aligned to its dtype.
    order = sorted(tensors, key=lambda key: (-tensors[key].parameters[0].itemsize, key))
    with Path(path).open("wb") as file:
        _write_header(file, {key: tensors[key] for key in order})
        for key in order:
            for tensor in _parts(tensors[key]):
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
    """The open file of every key."""
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
        for source, parameters in _read(slices[key], held):
            for view, parameter in zip(held.entry.views(source), parameters, strict=True):
                parameter.copy_(view)


def _layout_of(in_block: Mapping[str, Any], family: Family, where: str) -> Layout:
    """The layout whose experts the checkpoint has: that of published checkpoints, or as in memory."""

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


def _read(source: Any, held: Held) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """A tensor of the file, one expert at a time where it is a stack, and our parameters for it."""
    if not held.entry.is_stack:
        yield source[...], held.parameters
        return
    for expert in range(len(held.parameters[0])):
        yield source[expert], [parameter[expert] for parameter in held.parameters]


def _parts(held: Held) -> Iterator[Tensor]:
    """The tensor to write, one expert at a time where it is a stack."""
    if not held.entry.is_stack:
        yield held.entry.join(held.parameters)
        return
    for expert in range(len(held.parameters[0])):
        yield held.entry.join([parameter[expert] for parameter in held.parameters])


def _write_header(file: BinaryIO, tensors: Mapping[str, Held]) -> None:
    """The length of the header in 8 bytes, then the header, padded to 8 bytes.

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
