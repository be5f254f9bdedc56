"""Names and layouts of quantized weights in published checkpoints."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from maxmoe.presets.layouts import Held
from maxmoe.quantization import FORMATS, QuantizedStack
from maxmoe.quantization.checks import check_values

# Names of dtypes in safetensors, in the order in which its library writes tensors, last first.
DTYPES = {
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_SCALES = ("F32", "BF16", "F16")


class Published(ABC):
    """How checkpoints store a weight in one format: a few tensors whose names end differently.

    Attributes:
        format: name of the format.
        dtypes: allowed dtypes of each tensor by the end of its name, as safetensors names them; the codes come first.
        scales: end of the name of the scales.
        optional: ends of the names of tensors that may be missing.
    """

    format: ClassVar[str]
    dtypes: ClassVar[Mapping[str, tuple[str, ...]]]
    scales: ClassVar[str]
    optional: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def tensors(self, stack: QuantizedStack) -> dict[str, Tensor]:
        """Return the published tensors of one matrix, by the ends of their names."""

    @abstractmethod
    def parts(self, tensors: Mapping[str, Tensor], columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes, scales and zero points of one matrix from its published tensors."""

    def check(self, tensors: Mapping[str, Tensor], stack: QuantizedStack) -> None:
        """Raise unless the values of the tensors without the codes are those of a matrix such as `stack`."""
        check_values(tensors[self.scales], None)

    def names(self, key: str) -> dict[str, str]:
        """Return the names of the tensors of the weight `key`, by their ends."""
        return {end: f"{key}{end}" for end in self.dtypes}


class _Mxfp4(Published):
    """Tensors of gpt-oss: blocks ``(out, in / 32, 16)`` of bytes and scales ``(out, in / 32)``."""

    format = "mxfp4"
    dtypes: ClassVar = {"_blocks": ("U8",), "_scales": ("U8",)}
    scales = "_scales"

    def tensors(self, stack: QuantizedStack) -> dict[str, Tensor]:
        codes = functional.pad(stack.codes, (0, -stack.codes.shape[-1] % 16))
        return {"_blocks": codes.reshape(codes.shape[0], -1, 16), "_scales": stack.scales}

    def parts(self, tensors: Mapping[str, Tensor], columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return tensors["_blocks"].flatten(1)[:, : -(-columns // 2)], tensors["_scales"], None


class _BlockFp8(Published):
    """Tensors of DeepSeek-V3: E4M3 ``(out, in)`` and what its blocks of 128 x 128 are multiplied by."""

    format = "fp8_block"
    dtypes: ClassVar = {"": ("F8_E4M3",), "_scale_inv": _SCALES}
    scales = "_scale_inv"

    def tensors(self, stack: QuantizedStack) -> dict[str, Tensor]:
        return {"": stack.codes.contiguous().view(torch.float8_e4m3fn), "_scale_inv": stack.scales}

    def parts(self, tensors: Mapping[str, Tensor], columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return tensors[""].view(torch.uint8), tensors["_scale_inv"], None


class _PackedInt4(Published):
    """Tensors of the format pack-quantized of compressed-tensors, eight codes in an int32, the first one lowest.

    Zero points are packed along the outputs. Without them they are 8.
    """

    format = "int4"
    dtypes: ClassVar = {
        "_packed": ("I32",),
        "_scale": _SCALES,
        "_shape": ("I64", "I32"),
        "_zero_point": ("I32",),
    }
    scales = "_scale"
    optional = frozenset({"_zero_point"})

    def tensors(self, stack: QuantizedStack) -> dict[str, Tensor]:
        codes = functional.pad(stack.codes, (0, -stack.codes.shape[-1] % 4))
        tensors = {
            "_packed": codes.view(torch.int32),
            "_scale": stack.scales,
            "_shape": torch.tensor([stack.rows, stack.columns]),
        }
        if stack.zeros is not None:
            nibbles = functional.pad(stack.zeros.mT, (0, -stack.rows % 8))
            packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int32)
            tensors["_zero_point"] = packed.mT
        return tensors

    def check(self, tensors: Mapping[str, Tensor], stack: QuantizedStack) -> None:
        super().check(tensors, stack)
        shape = [stack.rows, stack.columns]
        if tensors["_shape"].tolist() != shape:
            raise ValueError(f"its _shape must hold {shape}, got {tensors['_shape'].tolist()}")

    def parts(self, tensors: Mapping[str, Tensor], columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = tensors["_packed"].shape[0]
        codes = tensors["_packed"].view(torch.uint8)[:, : -(-columns // 2)]
        zeros = None
        if "_zero_point" in tensors:
            packed = tensors["_zero_point"].mT.contiguous().view(torch.uint8)
            zeros = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :rows].mT.contiguous()
        return codes, tensors["_scale"], zeros


PUBLISHED: dict[str, Published] = {each.format: each for each in (_Mxfp4(), _BlockFp8(), _PackedInt4())}


def published(stack: QuantizedStack, name: str) -> Published:
    """Return how checkpoints store the format of a stack; raise for a format of no published checkpoint."""
    if stack.format not in PUBLISHED:
        raise ValueError(f"{name} must be quantized as {', '.join(PUBLISHED)}, as checkpoints are, got {stack.format}")
    return PUBLISHED[stack.format]


def ends_of_codes(end: str) -> tuple[str, ...]:
    """Return how the name of a weight that ends with `end` may end in a checkpoint, quantized or not."""
    return tuple({f"{end}{next(iter(each.dtypes))}" for each in PUBLISHED.values()})


def format_in(key: str, dtypes: Mapping[str, str]) -> str | None:
    """Return the format of the weight `key` in a checkpoint, None if it is not quantized.

    Args:
        key: name of the weight.
        dtypes: dtypes of all tensors by their names.
    """
    for each in PUBLISHED.values():
        names = each.names(key)
        if all(names[end] in dtypes for end in each.dtypes if end not in each.optional):
            return each.format
    return "of an unknown format" if dtypes.get(key, "F").startswith(("F8", "I", "U")) else None


def template(held: Held, headers: Mapping[str, tuple[str, list[int]]], key: str) -> QuantizedStack:
    """Return a matrix on the meta device with the parts that a checkpoint has for one weight, in its published shape.

    Args:
        held: parameters in the weight, and its layout.
        headers: dtype and shape of the tensors in the checkpoint by their names, from which the dtype of the scales,
            the group size and whether there are zero points are taken.
        key: name of the weight.
    """
    parameters = [parameter[0] if held.entry.is_stack else parameter for parameter in held.parameters]
    empty = held.entry.join([parameter.to("meta") for parameter in parameters])
    assert isinstance(empty, QuantizedStack)
    format, names = FORMATS[empty.format], published(empty, key).names(key)
    dtype, shape = headers[names[published(empty, key).scales]]
    num_scales = empty.scales.shape[-1]
    if format.has_groups and shape and format.block_columns(empty.columns, shape[-1]):
        num_scales = shape[-1]
    scale_dtype = next((kind for kind in format.scale_dtypes if DTYPES[kind] == dtype), empty.scales.dtype)
    scales = empty.scales.new_empty((empty.scales.shape[0], num_scales), dtype=scale_dtype)
    return QuantizedStack(
        empty.codes,
        scales,
        zeros=torch.empty_like(scales, dtype=torch.uint8) if names.get("_zero_point") in headers else None,
        format=empty.format,
        columns=empty.columns,
        is_transposed=empty.is_transposed,
    )


class ConfigFormat:
    """What the config beside a checkpoint says of its quantization.

    Args:
        folder: folder of the checkpoint, or one of its files, which has no config.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        config: dict[str, Any] = {}
        if folder.is_dir() and self.path.is_file():
            config = json.loads(self.path.read_text())
        text = config.get("text_config") or {}
        self._values: dict[str, Any] = config.get("quantization_config") or text.get("quantization_config") or {}

    def check(self, name: str, format: str, block: int) -> None:
        """Raise if the config says another format or another number of weights per scale than a tensor has."""
        said = self._format_and_block()
        if said is not None and said != (format, block):
            raise ValueError(
                f"{name} must be quantized as {said[0]}, with {said[1]} weights of a row per scale, as {self.path} "
                f"says, got {format} with {block}"
            )

    def _format_and_block(self) -> tuple[str, int] | None:
        """Return the format and the columns of a block; None without a config."""
        values = self._values
        match values.get("quant_method"):
            case None:
                return None
            case "mxfp4":
                return "mxfp4", 32
            case "fp8":
                return "fp8_block", (values.get("weight_block_size") or [0, 0])[1]
            case "compressed-tensors":
                groups: dict[str, Any] = values.get("config_groups") or {}
                group: dict[str, Any] = next(iter(groups.values()), {"weights": {}})["weights"]
                return f"{group.get('type')}{group.get('num_bits')}", group.get("group_size") or 0
            case method:
                return str(method), 0
