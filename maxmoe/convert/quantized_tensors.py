"""Names and layouts of quantized weights in published checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from maxmoe.quantization import QuantizedStack

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


class Published(ABC):
    """How checkpoints store a weight in one format: a few tensors whose names end differently."""

    format: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]  # of the names of the codes, the scales, and other tensors

    @abstractmethod
    def tensors(self, stack: QuantizedStack) -> dict[str, Tensor]:
        """Return the published tensors of one matrix, by the ends of their names."""

    @abstractmethod
    def parts(self, tensors: Mapping[str, Tensor], columns: int) -> dict[str, Any]:
        """Return codes, scales and zero points of one matrix from its published tensors."""


class _Mxfp4(Published):
    """Tensors of gpt-oss: blocks ``(out, in / 32, 16)`` of bytes and scales ``(out, in / 32)``."""

    format = "mxfp4"
    ends = ("_blocks", "_scales")

    def tensors(self, stack: QuantizedStack) -> dict[str, Tensor]:
        codes = functional.pad(stack.codes, (0, -stack.codes.shape[-1] % 16))
        return {"_blocks": codes.reshape(codes.shape[0], -1, 16), "_scales": stack.scales}

    def parts(self, tensors: Mapping[str, Tensor], columns: int) -> dict[str, Any]:
        return {"codes": tensors["_blocks"].flatten(1)[:, : -(-columns // 2)], "scales": tensors["_scales"]}


class _BlockFp8(Published):
    """Tensors of DeepSeek-V3: E4M3 ``(out, in)`` and what its blocks of 128 x 128 are multiplied by."""

    format = "fp8_block"
    ends = ("", "_scale_inv")

    def tensors(self, stack: QuantizedStack) -> dict[str, Tensor]:
        return {"": stack.codes.contiguous().view(torch.float8_e4m3fn), "_scale_inv": stack.scales}

    def parts(self, tensors: Mapping[str, Tensor], columns: int) -> dict[str, Any]:
        return {"codes": tensors[""].view(torch.uint8), "scales": tensors["_scale_inv"]}


class _PackedInt4(Published):
    """Tensors of the format pack-quantized of compressed-tensors, eight codes in an int32, the first one lowest.

    Zero points are packed along the outputs. Without them they are 8.
    """

    format = "int4"
    ends = ("_packed", "_scale", "_shape", "_zero_point")

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

    def parts(self, tensors: Mapping[str, Tensor], columns: int) -> dict[str, Any]:
        codes = tensors["_packed"].view(torch.uint8)[:, : -(-columns // 2)]
        parts = {"codes": codes, "scales": tensors["_scale"]}
        if "_zero_point" in tensors:
            packed = tensors["_zero_point"].mT.contiguous().view(torch.uint8)
            nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
            parts["zeros"] = nibbles[:, : len(codes)].mT.contiguous()
        return parts


PUBLISHED: dict[str, Published] = {each.format: each for each in (_Mxfp4(), _BlockFp8(), _PackedInt4())}


def published(stack: QuantizedStack, name: str) -> Published:
    """Return how checkpoints store the format of a stack; raise for a format of no published checkpoint."""
    if stack.format not in PUBLISHED:
        raise ValueError(f"{name} must be quantized as {', '.join(PUBLISHED)}, as checkpoints are, got {stack.format}")
    return PUBLISHED[stack.format]
