"""The header of a safetensors file, whose tensors are then written one after the other."""

import json
import math
from collections.abc import Mapping
from typing import Any, BinaryIO, Protocol

import torch

from maxmoe.convert.stored_weights import DTYPES


class Tensor(Protocol):
    """A tensor, or its dtype and shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""


def write_header(file: BinaryIO, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write the length of the header in 8 bytes, then the header, padded to 8 bytes; return where each tensor begins.

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
    return {key: 8 + len(text) + header[key]["data_offsets"][0] for key in tensors}
