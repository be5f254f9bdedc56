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
    """Return the format of the weight `key` in a checkpoint, or what it lacks; None if it is not quantized.

    Args:
        key: name of the weight.
        dtypes: dtypes of all tensors by their names.
    """
    for each in PUBLISHED.values():
        codes, *others = (name for end, name in each.names(key).items() if end not in each.optional)
        missing = [name for name in others if name not in dtypes]
        if codes in dtypes and not missing:
            return each.format
        if codes in dtypes and codes != key:
            return f"{each.format} without {' and '.join(missing)}"
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
    empty: QuantizedStack = held.entry.join([parameter.map(lambda part: part.to("meta")) for parameter in parameters])
    format, names = FORMATS[empty.format], published(empty, key).names(key)
    dtype, shape = headers[names[published(empty, key).scales]]
    num_scales = empty.scales.shape[-1]
    if format.has_groups and shape and format.block_columns(empty.columns, shape[-1]):
        num_scales = shape[-1]
    scale_dtype = next((kind for kind in format.scale_dtypes if DTYPES[kind] == dtype), empty.scales.dtype)
    scales = empty.scales.new_empty((empty.scales.shape[0], num_scales), dtype=scale_dtype)
    zeros = torch.empty_like(scales, dtype=torch.uint8) if names.get("_zero_point") in headers else None
    return empty.map(scales=scales, zeros=zeros)


class ConfigFormat:
    """What the config beside a checkpoint says of its quantization.

    Args:
        folder: folder of the checkpoint, or one of its files, which has no config.

    Raises:
        ValueError: if the config is no JSON object.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        self._config: dict[str, Any] = {}
        if folder.is_dir() and self.path.is_file():
            try:
                self._config = self._object("the file", json.loads(self.path.read_text()))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{self.path} must be a JSON file: {error}") from error

    def check(self, name: str, stack: QuantizedStack) -> None:
        """Raise if the config says another format or another number of weights per scale than a tensor has."""
        said = self._format_and_block()
        found = (stack.format, (stack.rows_per_scale, stack.columns_per_scale))
        if said is None or said in (found, (stack.format, None)):
            return
        wanted, got = (
            format if block is None else f"{format}, with a scale for {block[0]} x {block[1]} weights"
            for format, block in (said, found)
        )
        raise ValueError(f"{name} must be quantized as {wanted}, as {self.path} says, got {got}")

    def _format_and_block(self) -> tuple[str, tuple[int, int] | None] | None:
        """Return the format, and the rows and columns of a block or None if it is not said; None without a config."""
        values = self._config.get("quantization_config")
        if values is None:
            values = self._object("text_config", self._config.get("text_config")).get("quantization_config")
        values = self._object("quantization_config", values)
        match values.get("quant_method"):
            case None:
                return None
            case "mxfp4":
                return "mxfp4", (1, 32)
            case "fp8":
                block = values.get("weight_block_size")
                return "fp8_block", None if block is None else self._block("weight_block_size", block)
            case "compressed-tensors":
                groups = self._object("config_groups", values.get("config_groups"))
                group = self._object("a group of config_groups", next(iter(groups.values()), None))
                weights = self._object("weights of config_groups", group.get("weights"))
                if "type" not in weights or "num_bits" not in weights:
                    raise ValueError(
                        f"{self.path}: config_groups must have weights with type and num_bits, got {groups}"
                    )
                size = weights.get("group_size")
                block = None if size in (None, -1) else self._block("group_size", [1, size])
                return f"{weights['type']}{weights['num_bits']}", block
            case method:
                return str(method), None

    def _object(self, name: str, value: object) -> dict[str, Any]:
        """Return a JSON object, which is empty for null; raises for any other value."""
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{self.path}: {name} must be a JSON object, got {value!r}")
        return value or {}

    def _block(self, name: str, value: object) -> tuple[int, int]:
        if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
            raise ValueError(f"{self.path}: {name} must be the size of a block, got {value!r}")
        return value[0], value[1]
