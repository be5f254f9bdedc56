"""Reading and writing of Mixture-of-Experts layers in the safetensors checkpoints of published models.

Weights are copied one expert at a time, so that the additional memory does not depend on the size of the checkpoint.
"""

import json
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from maxmoe.checks.whole_tensors import check_whole
from maxmoe.convert.safetensors_header import write_header
from maxmoe.convert.stored_weights import DTYPES, PUBLISHED, StoredWeight, check_weights, read_weights
from maxmoe.families.family import Family, families
from maxmoe.families.layouts import Layout
from maxmoe.files import replacing
from maxmoe.nn import MoE
from maxmoe.nn.checks import check_parts_are_known
from maxmoe.quantization import QuantizedStack, state_with_stacks
from maxmoe.text_table import listed


@torch.no_grad()
def read_checkpoint(path: str | Path, layers: Mapping[str, MoE], family: str) -> None:
    """Read the weights of layers from a checkpoint, with one tensor per expert or with stacked experts.

    Experts that `maxmoe.quantize_experts` has quantized are read from checkpoints of their format without expansion:
    "mxfp4" as in gpt-oss, "nvfp4" as in ModelOpt and in the format nvfp4-pack-quantized of compressed-tensors,
    "fp8_block" as in DeepSeek-V3, "int4" as in the format pack-quantized of compressed-tensors.
    The dtype of the scales, the group size and zero points are taken from the checkpoint. Such experts may be on the
    meta device; they get memory on the CPU.

    Args:
        path: safetensors file, or folder with the files of one model.
        layers: layers by the name of their block in the decoder, such as ``{"model.layers.3": layer}``. They are
            overwritten, in their dtype.
        family: `model_type` in the config of the model, such as "mixtral".

    Raises:
        ValueError: for an unknown family, for a file that is not in safetensors format, for tensors whose names,
            shapes or formats do not fit the layers, for scales that are not finite, for quantized experts beside a
            config.json with a block size that is not a power of two, and for layers that are sharded. No layer has been
            changed then.
    """
    known = _family(family)
    for block, layer in layers.items():
        _check_state("read_checkpoint", block, layer, may_be_quantized=True)
    with ExitStack() as stack:
        files = _open(Path(path), stack)
        checked = []
        for block, layer in layers.items():
            keys = [key.removeprefix(f"{block}.") for key in files if key.startswith(f"{block}.")]
            if not keys:
                raise ValueError(f"{path} must have keys that begin with {block}., got {listed(sorted(files))}")
            layout = _layout_of(keys, known, f"{path} as {family}: {block}")
            base = f"{block}.{layout.prefix}"
            of_layer = [f"{block}.{key}" for key in keys if layout.has(key)]
            slices = {key.removeprefix(base): files[key].get_slice(key) for key in of_layer}
            state = check_weights(f"{path} as {family}: {base[:-1]}", layer, layout, slices)
            checked.append((layer, layout, slices, state))
        if any(isinstance(weight, QuantizedStack) for *_, state in checked for weight in state.values()):
            _check_block_sizes(Path(path) / "config.json")
        for each in checked:
            read_weights(*each)


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
        _check_state("write_checkpoint", block, layer)
        for key, held in layout.tensors(state_with_stacks(layer)).items():
            weight = StoredWeight(key, held)
            for name, (dtype, shape) in weight.tensors().items():
                tensors[f"{block}.{layout.prefix}{name}"] = _Tensor(dtype, shape, weight, name)
    order = dict(sorted(tensors.items(), key=lambda each: (-[*DTYPES].index(each[1].dtype), each[0])))
    with replacing(path) as new, new.open("wb") as file:
        write_header(file, order)
        for tensor in order.values():
            for piece in tensor.weight.pieces(tensor.name):
                file.write(piece.cpu().reshape(-1).view(torch.uint8).numpy().data)


class _Tensor(NamedTuple):
    """A tensor to write, and the weight to which it belongs under a name."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    weight: StoredWeight
    name: str


def _family(name: str) -> Family:
    if name not in families():
        raise ValueError(f"family must be one of {', '.join(families())}, got {name!r}")
    families()[name].check_convertible()
    return families()[name]


def _check_state(what: str, block: str, layer: MoE, *, may_be_quantized: bool = False) -> None:
    """Raise for sharded parameters, and for those on the meta device, where quantized ones may be."""
    check_whole(what, layer.state_dict(), prefix=f"{block}.")
    for name, tensor in state_with_stacks(layer).items():
        if tensor.is_meta and not (may_be_quantized and isinstance(tensor, QuantizedStack)):
            raise ValueError(f"{block}: {name} must have memory, got the meta device; call layer.to_empty first")


def _open(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Open all files of a checkpoint, and return the file of every key."""
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{path} must be a safetensors file or a folder of them, got a folder without any")
    files: dict[str, Any] = {}
    for each in paths:
        if not stat.S_ISREG(each.stat().st_mode):  # opening a FIFO waits for a writer
            raise ValueError(f"{each} must be a safetensors file")
        try:
            file = stack.enter_context(safe_open(each, "pt"))
        except SafetensorError as error:
            raise ValueError(f"{each} must be a safetensors file: {error}") from error
        keys = file.keys()
        for key in keys:
            if key in files:
                raise ValueError(f"{path}: {key} must be in one file, it is in two, the second is {each.name}")
            files[key] = file
    return files


def _layout_of(keys: Sequence[str], family: Family, where: str) -> Layout:
    """Return the layout whose expert names are in the checkpoint: the published one, or the stacked one in memory."""

    def has(layout: Layout) -> bool:
        ends = [f"{layout.prefix}{entry.key}".split("{expert}") for entry in layout.entries if entry.is_of_experts]
        # Codes of "fp8_block" and "nvfp4" have the names of ordinary weights.
        codes = {each.ends[0] for kinds in PUBLISHED.values() for each in kinds}
        ends_of_codes = [(end[0], tuple(f"{end[-1]}{each}" for each in codes)) for end in ends]
        return any(key.startswith(begin) and key.endswith(end) for begin, end in ends_of_codes for key in keys)

    for layout in (family.checkpoint, family.block):
        if has(layout):
            return layout
    others = [name for name, other in families().items() if has(other.checkpoint) or has(other.block)]
    found = f"the names belong to {', '.join(others)}" if others else f"got {listed(sorted(keys))}"
    wanted = next(entry.key for entry in family.checkpoint.entries if entry.is_of_experts)
    raise ValueError(f"{where} must have {family.checkpoint.prefix}{wanted}; {found}")


def _check_block_sizes(config: Path) -> None:
    """Raise if the config of a folder has a block size that is not a power of two, which no format has.

    The shapes of the scales do not tell: 192 weights have two scales in blocks of 128 and in blocks of 96.
    """
    if not config.is_file():
        return
    objects: list[dict[str, Any]] = []  # all of the file, also nested ones
    try:
        json.loads(config.read_text(), object_hook=objects.append)
    except ValueError as error:
        raise ValueError(f"{config} must be a JSON file: {error}") from error
    for values in objects:
        block = values.get("weight_block_size", values.get("group_size") if "num_bits" in values else None)
        for size in block if isinstance(block, list) else [block]:
            if isinstance(size, int) and size > 0 and size & (size - 1):
                raise ValueError(f"{config}: the block size of weights must be a power of two, got {block}")
