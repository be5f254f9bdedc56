"""Weights of a layer, also quantized ones, in the tensors of a checkpoint: their names and dtypes, reading, writing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from maxmoe.families.layouts import Held, Layout, check_tensors
from maxmoe.quantization import FORMATS, QuantizedStack, on_meta, put_stack, state_with_stacks

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
_FLOATS = ("F64", "F32", "BF16", "F16")

# Tensors, or slices of opened safetensors files, by the names of tensors.
Slices = Mapping[str, Any]


class Published:
    """How checkpoints store a weight: a tensor, or several whose names end differently if it is quantized."""

    format: ClassVar[str | None] = None  # of quantized weights
    ends: ClassVar[tuple[str, ...]] = ("",)  # of the names of the codes, the scales, and other tensors
    has_number: ClassVar[bool] = False  # whether the last of these is one number, for an expert or for all
    unused: ClassVar[tuple[str, ...]] = ()  # ends of names, which replace "weight", of tensors that are not read

    def tensors(self, weight: Any) -> dict[str, Tensor]:
        """Return the published tensors of one matrix, by the ends of their names."""
        return {"": weight}

    def weight(self, tensors: Mapping[str, Tensor], like: Any) -> Any:
        """Return one matrix from its published tensors; it has the layout of `like`."""
        return tensors[""]

    def check(self, tensors: Mapping[str, Tensor], like: Any) -> None:
        """Raise unless the values of the tensors beside the codes fit a quantized matrix such as `like`."""
        FORMATS[like.format].check_values(tensors[self.ends[1]])


class _Mxfp4(Published):
    """Tensors of gpt-oss: blocks ``(out, in / 32, 16)`` of bytes and scales ``(out, in / 32)``."""

    format = "mxfp4"
    ends = ("_blocks", "_scales")

    def tensors(self, weight: QuantizedStack) -> dict[str, Tensor]:
        codes = functional.pad(weight.codes, (0, -weight.codes.shape[-1] % 16))
        return {"_blocks": codes.reshape(codes.shape[0], -1, 16), "_scales": weight.scales}

    def weight(self, tensors: Mapping[str, Tensor], like: QuantizedStack) -> QuantizedStack:
        return like.map(codes=tensors["_blocks"].flatten(1)[:, : -(-like.columns // 2)], scales=tensors["_scales"])


class _BlockFp8(Published):
    """Tensors of DeepSeek-V3: E4M3 ``(out, in)`` and what its blocks of 128 x 128 are multiplied by."""

    format = "fp8_block"
    ends = ("", "_scale_inv")

    def tensors(self, weight: QuantizedStack) -> dict[str, Tensor]:
        return {"": weight.codes.contiguous().view(torch.float8_e4m3fn), "_scale_inv": weight.scales}

    def weight(self, tensors: Mapping[str, Tensor], like: QuantizedStack) -> QuantizedStack:
        return like.map(codes=tensors[""].view(torch.uint8), scales=tensors["_scale_inv"])


class _PackedInt4(Published):
    """Tensors of the format pack-quantized of compressed-tensors, eight codes in an int32, the first one lowest.

    Zero points are packed along the outputs. Without them they are 8.
    """

    format = "int4"
    ends = ("_packed", "_scale", "_shape", "_zero_point")

    def tensors(self, weight: QuantizedStack) -> dict[str, Tensor]:
        codes = functional.pad(weight.codes, (0, -weight.codes.shape[-1] % 4))
        shape = torch.tensor([weight.rows, weight.columns])
        tensors = {"_packed": codes.view(torch.int32), "_scale": weight.scales, "_shape": shape}
        if weight.zeros is not None:
            nibbles = functional.pad(weight.zeros.mT, (0, -weight.rows % 8))
            packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int32)
            tensors["_zero_point"] = packed.mT
        return tensors

    def check(self, tensors: Mapping[str, Tensor], like: QuantizedStack) -> None:
        super().check(tensors, like)
        shape = [like.rows, like.columns]
        if tensors["_shape"].tolist() != shape:
            raise ValueError(f"its _shape must hold {shape}, got {tensors['_shape'].tolist()}")

    def weight(self, tensors: Mapping[str, Tensor], like: QuantizedStack) -> QuantizedStack:
        codes, zeros = tensors["_packed"].view(torch.uint8)[:, : -(-like.columns // 2)], None
        if "_zero_point" in tensors:
            packed = tensors["_zero_point"].mT.contiguous().view(torch.uint8)
            nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
            zeros = nibbles[:, : len(codes)].mT.contiguous()
        return like.map(codes=codes, scales=tensors["_scale"], zeros=zeros)


class _Nvfp4(Published):
    """Tensors of ModelOpt: bytes ``(out, in / 2)``, E4M3 ``(out, in / 16)``, and a float32 for the matrix.

    In the layout of a stack with the dims in and out, as of gpt-oss and Llama 4, bytes and scales are transposed.
    Scales of activations are not read: rows are not quantized.
    """

    format = "nvfp4"
    ends = ("", "_scale", "_scale_2")
    has_number = True
    unused = ("input_scale",)

    def tensors(self, weight: QuantizedStack) -> dict[str, Tensor]:
        codes, scales = weight.codes, weight.scales.view(torch.float8_e4m3fn)
        if weight.is_transposed:
            codes, scales = codes.mT, scales.mT
        row_scales = weight.parts()["row_scales"]
        if not row_scales.is_meta and bool((row_scales != row_scales[0]).any()):
            low, high = (each.item() for each in row_scales.aminmax())
            raise ValueError(f"checkpoints in nvfp4 have one scale for all rows of a matrix, got {low:g} to {high:g}")
        return dict(zip(self.ends, (codes, scales, row_scales[0, 0]), strict=True))

    def check(self, tensors: Mapping[str, Tensor], like: QuantizedStack) -> None:
        _, scales, number = self.ends
        values = (tensors[scales].view(torch.uint8), None, self._row_scale(tensors[number]))
        FORMATS["nvfp4"].check_values(*values)

    def weight(self, tensors: Mapping[str, Tensor], like: QuantizedStack) -> QuantizedStack:
        codes, scales, number = (tensors[end] for end in self.ends)
        if like.is_transposed:
            codes, scales = codes.mT, scales.mT
        row_scales = self._row_scale(number).expand(like.rows, 1)
        return like.map(codes=codes, scales=scales.view(torch.uint8), row_scales=row_scales)

    def _row_scale(self, number: Tensor) -> Tensor:
        """Return the scale of all rows, ``(1, 1)``, from the published number."""
        return number.reshape(1, 1)


class _StackedNvfp4(_Nvfp4):
    """Tensors of ModelOpt for a weight that is no module."""

    ends = ("", "_weight_scale", "_weight_scale_2")
    unused = ("_input_scale",)


class _PackedNvfp4(_Nvfp4):
    """Tensors of the format nvfp4-pack-quantized of compressed-tensors, whose number the scales are divided by.

    They are read with its reciprocal, rounded to float32, as vLLM reads them.
    """

    ends = ("_packed", "_scale", "_global_scale")
    unused = ("input_global_scale",)

    def _row_scale(self, number: Tensor) -> Tensor:
        return number.reshape(1, 1).reciprocal()


# The first one is written. "weight" ends the name of the weight of a module, not of a stack.
PUBLISHED: dict[str, tuple[Published, ...]] = {
    "mxfp4": (_Mxfp4(),),
    "nvfp4": (_Nvfp4(), _PackedNvfp4()),
    "fp8_block": (_BlockFp8(),),
    "int4": (_PackedInt4(),),
}
_STACKED: dict[str, Published] = {"nvfp4": _StackedNvfp4()}


def published(weight: Any, key: str, slices: Slices = MappingProxyType({})) -> Published:
    """Return how checkpoints store a weight with a name, or one with these tensors.

    Raises for a format of no published checkpoint.
    """
    if not isinstance(weight, QuantizedStack):
        return Published()
    format = weight.format
    if format not in PUBLISHED:
        raise ValueError(f"{key} must be quantized as {', '.join(PUBLISHED)}, as checkpoints are, got {format}")
    if format in _STACKED and not key.endswith("weight"):
        return _STACKED[format]
    return next((each for each in PUBLISHED[format] if f"{key}{each.ends[0]}" in slices), PUBLISHED[format][0])


class StoredWeight:
    """A weight in a checkpoint: one tensor, or several if it is quantized."""

    def __init__(self, key: str, held: Held, slices: Slices = MappingProxyType({})) -> None:
        self.key, self.held = key, held
        self.published = published(held.parameters[0], key, slices)
        if held.is_flat and self.published.format:
            raise ValueError(f"{key} has the matrices of all experts in one, which cannot be {self.published.format}")
        _, parameters = next(self.experts())
        self.matrix = held.entry.join([on_meta(parameter) for parameter in parameters])

    def experts(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield the index and the parameters of each expert in a stack, or of a tensor without an expert dim."""
        if not self.held.entry.is_stack:
            yield ..., self.held.parameters
            return
        num_experts = self.held.parameters[0].shape[0]
        rows = self.held.shape[0] // num_experts  # of an expert, where the tensor is flat
        for expert in range(num_experts):
            index = slice(expert * rows, (expert + 1) * rows) if self.held.is_flat else expert
            yield index, [parameter[expert] for parameter in self.held.parameters]

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of the tensors in the checkpoint, by their names."""
        if self.held.is_flat:
            return {self.key: (self.matrix.dtype, (*self.held.shape,))}
        leading = self.held.parameters[0].shape[:1] if self.held.entry.is_stack else ()
        parts = self.published.tensors(self.matrix)
        return {f"{self.key}{end}": (part.dtype, (*leading, *part.shape)) for end, part in parts.items()}

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the values of a tensor in the checkpoint, one expert at a time."""
        for _, parameters in self.experts():
            yield self.published.tensors(self.held.entry.join(parameters))[name.removeprefix(self.key)]

    def has_shape(self, name: str, found: Sequence[int], expected: Sequence[int]) -> bool:
        """Return whether a tensor of a checkpoint has the expected shape; a number may be of all experts."""
        is_of_all = self._is_number(name.removeprefix(self.key)) and math.prod(found) == 1
        return is_of_all or tuple(found) == tuple(expected)

    def _is_number(self, end: str) -> bool:
        """Return whether a tensor is one number for an expert, or for all, given the end of its name."""
        return self.published.has_number and end == self.published.ends[-1]

    @property
    def unused(self) -> set[str]:
        """Names of tensors of checkpoints that are not read."""
        return {f"{self.key.removesuffix('weight')}{end}" for end in self.published.unused}

    def _read(self, slices: Slices, names: Mapping[str, str], index: Any) -> dict[str, Tensor]:
        """Return the tensors of an expert; a number may be of all experts."""
        tensors = {}
        for end, name in names.items():
            part = slices[name][...] if self._is_number(end) else slices[name]
            is_of_all = self._is_number(end) and part.numel() == 1
            tensors[end] = part if is_of_all else part[index]
        return tensors

    def check(self, where: str, slices: Slices) -> None:
        """Read the tensors beside the codes of a quantized weight; raise unless their values fit the weight."""
        names = {end: f"{self.key}{end}" for end in self.published.ends[1:] if f"{self.key}{end}" in slices}
        for index, _ in self.experts():
            try:
                self.published.check(self._read(slices, names, index), self.matrix)
            except ValueError as error:
                expert = "" if index is ... else f" of expert {index}"
                raise ValueError(f"{where}: {self.key}{expert}: {error}") from error

    def read(self, slices: Slices) -> None:
        """Copy the tensors into the parameters, one expert at a time."""
        names = {end: f"{self.key}{end}" for end in self.published.ends if f"{self.key}{end}" in slices}
        for index, parameters in self.experts():
            weight = self.published.weight(self._read(slices, names, index), self.matrix)
            for view, parameter in zip(self.held.entry.views(weight), parameters, strict=True):
                parameter.copy_(view)


def check_weights(where: str, layer: nn.Module, layout: Layout, slices: Slices) -> dict[str, Any]:
    """Return the state of a layer as a checkpoint has it; raises unless the tensors fit.

    Quantized weights are on the meta device. The dtype of their scales, their group size and whether they have zero
    points are as in the tensors of the first expert.
    """
    own = state_with_stacks(layer)
    state, formats = dict(own), {each.format for each in own.values() if isinstance(each, QuantizedStack)}
    if formats:
        where = f"{where}, whose experts are quantized as {' and '.join(sorted(formats))}"
    for key, held in layout.tensors(own).items():
        for name in held.entry.names:
            if isinstance(own[name], QuantizedStack) and state[name] is own[name]:
                state[name] = _as_stored(own[name], key, slices)
    weights = [StoredWeight(key, held, slices) for key, held in layout.tensors(state).items()]
    expected = {name: (each, *tensor) for each in weights for name, tensor in each.tensors().items()}
    unused = {name for each in weights for name in each.unused}
    found = {name: each.get_shape() for name, each in slices.items() if name not in unused}
    for name, (weight, _, shape) in expected.items():
        if name in found and weight.has_shape(name, found[name], shape):
            found[name] = shape
    check_tensors(where, found, {name: shape for name, (_, _, shape) in expected.items()})
    for name, (weight, dtype, _) in expected.items():
        allowed: tuple[str, ...] = _FLOATS
        if weight.published.format or not dtype.is_floating_point:
            allowed = ("I64", "I32") if dtype == torch.int64 else (DTYPES[dtype],)
        if slices[name].get_dtype() not in allowed:
            remedy = "; dequantise it first" if allowed == _FLOATS else ""
            raise ValueError(f"{where}: {name} must be of {', '.join(allowed)}, got {slices[name].get_dtype()}{remedy}")
    for weight in weights:
        if weight.published.format:
            weight.check(where, slices)
    return state


def _as_stored(stack: QuantizedStack, key: str, slices: Slices) -> QuantizedStack:
    """Return a stack on the meta device with the scales and zero points that a weight has in a checkpoint."""
    format, dtype, (*of_scales, num_scales) = FORMATS[stack.format], stack.scales.dtype, stack.scales.shape
    stored = slices.get(f"{key}{published(stack, key).ends[1]}")
    if stored is not None and format.scale_bytes is None:
        shape = stored.get_shape()
        if format.has_groups and shape and format.block_columns(stack.columns, shape[-1]):
            num_scales = shape[-1]
        dtype = next((each for each in format.scale_dtypes if DTYPES[each] == stored.get_dtype()), dtype)
    scales = torch.empty((*of_scales, num_scales), dtype=dtype, device="meta")
    zeros = torch.empty_like(scales, dtype=torch.uint8) if f"{key}_zero_point" in slices else None
    return stack.map(on_meta, scales=scales, zeros=zeros)


def read_weights(layer: nn.Module, layout: Layout, slices: Slices, state: Mapping[str, Any]) -> None:
    """Read the tensors of a checkpoint into a layer, whose state `check_weights` has returned."""
    for name, stack in state.items():
        if isinstance(stack, QuantizedStack):
            _prepare(layer, name, stack)
    for key, held in layout.tensors(state_with_stacks(layer)).items():
        StoredWeight(key, held, slices).read(slices)


def _prepare(layer: nn.Module, name: str, stack: QuantizedStack) -> None:
    """Replace a quantized parameter that has no memory, or other scales than the checkpoint."""
    path, _, last = name.rpartition(".")
    owner = layer.get_submodule(path)
    old = getattr(owner, last)
    if old.is_meta or old.description() != stack.description():
        device, kept = ("cpu", {}) if old.is_meta else (old.device, {"codes": old.codes})
        put_stack(owner, last, stack.map(lambda part: torch.zeros_like(part, device=device), **kept))
