"""Reading and writing of Mixture-of-Experts layers in the safetensors checkpoints of published models.

Weights are copied one expert at a time, so that the additional memory does not depend on the size of the checkpoint.
"""

import json
import math
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from maxmoe.checks.whole_tensors import check_whole
from maxmoe.convert.layer_reader import InFile, LayerReader, experts_of
from maxmoe.convert.quantized_tensors import DTYPES, ConfigFormat, ends_of_codes, published
from maxmoe.files import replacing
from maxmoe.nn import MoE
from maxmoe.nn.checks import check_parts_are_known
from maxmoe.presets.families import FAMILIES, Family
from maxmoe.presets.layouts import Held, Layout, listed
from maxmoe.quantization import QuantizedStack, state_with_stacks


@torch.no_grad()
def read_checkpoint(path: str | Path, layers: Mapping[str, MoE], family: str) -> None:
    """Read the weights of layers from a checkpoint, with one tensor per expert or with stacked experts.

    Experts that `maxmoe.quantize_experts` has quantized are read from checkpoints of their format without expansion:
    "mxfp4" as in gpt-oss, "fp8_block" as in DeepSeek-V3, "int4" as in the format pack-quantized of compressed-tensors.
    The dtype of the scales, the group size and zero points are those of the checkpoint. Such experts may be on the meta
    device; they get memory on the CPU.

    Args:
        path: safetensors file, or folder with the files of one model. A config.json in the folder must agree with the
            format of quantized tensors.
        layers: layers by the name of their block in the decoder, such as ``{"model.layers.3": layer}``. They are
            overwritten, in their dtype.
        family: `model_type` in the config of the model, such as "mixtral".

    Raises:
        ValueError: for an unknown family, for a file that is not in safetensors format, for tensors with other names,
            shapes or formats than those of the layers, for scales that are not finite, and for layers that are
            sharded. No layer has been changed then.
    """
    known = _family(family)
    for block, layer in layers.items():
        check_whole("read_checkpoint", layer.state_dict(), prefix=f"{block}.")
        _check_memory(block, layer, may_be_quantized=True)
    with ExitStack() as stack:
        files = _open(Path(path), stack)
        config = ConfigFormat(Path(path))
        readers = []
        for block, layer in layers.items():
            in_block = _below(f"{block}.", files)
            if not in_block:
                raise ValueError(f"{path} must have keys that begin with {block}., got {listed(sorted(files))}")
            layout = _layout_of(in_block, known, f"{path} as {family}: {block}")
            base = f"{block}.{layout.module}"
            in_layer = _below(f"{layout.module}.", in_block)
            readers.append(LayerReader(f"{path} as {family}: {base}", base, layer, layout, in_layer, config))
        for reader in readers:
            reader.read()


@torch.no_grad()
def write_checkpoint(path: str | Path, layers: Mapping[str, MoE], family: str, *, stacked: bool = False) -> None:
    """Write the weights of layers with the names and layout of published checkpoints.

    Args:
        path: safetensors file, which is replaced when all weights have been written.
        layers: layers by the name of their block in the decoder, such as ``{"model.layers.3": layer}``.
        family: `model_type` in the config of the model, such as "mixtral".
        stacked: write all experts in one tensor, with the names of the models in transformers.

    Raises:
        ValueError: for an unknown family, for a layer with parameters that the family lacks, for a custom router or
            activation, and for a layer that is sharded. Nothing is written then.
    """
    layout = _family(family).block if stacked else _family(family).checkpoint
    tensors: dict[str, _Tensor] = {}
    for block, layer in layers.items():
        check_parts_are_known(layer, f"{block}: write_checkpoint")
        check_whole("write_checkpoint", layer.state_dict(), prefix=f"{block}.")
        _check_memory(block, layer, may_be_quantized=False)
        for key, held in layout.tensors(state_with_stacks(layer)).items():
            tensors |= _tensors_of(f"{block}.{layout.module}.{key}", held)
    order = sorted(tensors, key=lambda key: (-[*DTYPES].index(tensors[key].dtype), key))
    with replacing(path) as new, new.open("wb") as file:
        _write_header(file, {key: tensors[key] for key in order})
        for key in order:
            for piece in tensors[key].pieces():
                file.write(piece.cpu().contiguous().view(torch.uint8).numpy().data)


class _Tensor(NamedTuple):
    """A tensor in a checkpoint.

    Args:
        held: parameters that it contains.
        end: end of its name, if it is one of the tensors of a quantized weight, else None.
        dtype: its dtype.
        shape: its shape.
    """

    held: Held
    end: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    def pieces(self) -> Iterator[Tensor]:
        """Yield the values, one expert at a time."""
        for _, parameters in experts_of(self.held):
            weight = self.held.entry.join(parameters)
            if isinstance(weight, QuantizedStack):
                assert self.end is not None
                weight = published(weight, self.end).tensors(weight)[self.end]
            yield weight


def _tensors_of(key: str, held: Held) -> dict[str, _Tensor]:
    """Return the tensors of a weight, several for one that is quantized."""
    if not isinstance(held.parameters[0], QuantizedStack):
        return {key: _Tensor(held, None, held.parameters[0].dtype, held.shape)}
    _, parameters = next(experts_of(held))
    matrix = held.entry.join([parameter.map(lambda part: part.to("meta")) for parameter in parameters])
    leading = held.parameters[0].shape[:1] if held.entry.is_stack else ()
    tensors = published(matrix, key).tensors(matrix)
    return {
        f"{key}{end}": _Tensor(held, end, tensor.dtype, (*leading, *tensor.shape)) for end, tensor in tensors.items()
    }


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def _check_memory(block: str, layer: MoE, *, may_be_quantized: bool) -> None:
    """Raise if a parameter is on the meta device, where quantized ones may be when they are read."""
    for name, tensor in state_with_stacks(layer).items():
        if tensor.is_meta and not (may_be_quantized and isinstance(tensor, QuantizedStack)):
            raise ValueError(f"{block}: {name} must have memory, got the meta device; call layer.to_empty first")


def _open(path: Path, stack: ExitStack) -> dict[str, InFile]:
    """Open all files of a checkpoint, and return the file of every key."""
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{path} must be a safetensors file or a folder of them, got a folder without any")
    files: dict[str, InFile] = {}
    for each in paths:
        file = stack.enter_context(_open_file(each))
        keys = file.keys()
        for key in keys:
            if key in files:
                raise ValueError(f"{path}: {key} must be in one file, it is in two, the second is {each.name}")
            files[key] = InFile(file, each)
    return files


def _open_file(path: Path) -> safe_open:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO waits for a writer
        raise ValueError(f"{path} must be a safetensors file")
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file: {error}") from error


def _below(base: str, files: Mapping[str, InFile]) -> dict[str, InFile]:
    return {key.removeprefix(base): file for key, file in files.items() if key.startswith(base)}


def _layout_of(in_block: Mapping[str, InFile], family: Family, where: str) -> Layout:
    """Return the layout whose expert names are in the checkpoint: the published one, or the stacked one in memory."""

    def has(layout: Layout) -> bool:
        ends = [f"{layout.module}.{entry.key}".split("{expert}") for entry in layout.entries if entry.is_of_experts]
        return any(key.startswith(end[0]) and key.endswith(ends_of_codes(end[-1])) for end in ends for key in in_block)

    for layout in (family.checkpoint, family.block):
        if has(layout):
            return layout
    others = [name for name, other in FAMILIES.items() if has(other.checkpoint) or has(other.block)]
    found = f"the names are those of {', '.join(others)}" if others else f"got {listed(sorted(in_block))}"
    wanted = next(entry.key for entry in family.checkpoint.entries if entry.is_of_experts)
    raise ValueError(f"{where} must have {family.checkpoint.module}.{wanted}; {found}")


def _write_header(file: BinaryIO, tensors: Mapping[str, _Tensor]) -> None:
    """Write the length of the header in 8 bytes, then the header, padded to 8 bytes.

    Source: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for key, tensor in tensors.items():
        end = begin + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
