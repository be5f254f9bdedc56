"""Reading of one layer from the tensors of a checkpoint."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from maxmoe.convert.quantized_tensors import ConfigFormat, format_in, published, template
from maxmoe.presets.layouts import Held, Layout, check_tensors
from maxmoe.quantization import QuantizedStack, put_stack, state_with_stacks

_FLOATS = ("F64", "F32", "BF16", "F16")


class InFile(NamedTuple):
    """An opened safetensors file and its path."""

    file: Any
    path: Path


class LayerReader:
    """Reads the weights of one layer. Its constructor checks all tensors, so that no layer is read in part.

    Args:
        where: checkpoint, family and name of the layer, for messages.
        base: name of the layer in the checkpoint.
        layer: layer that is read into.
        layout: names and layouts of the tensors.
        files: file of each tensor of the layer, by its name in the layer.
        config: what the config of the checkpoint says of its quantization.
    """

    def __init__(
        self, where: str, base: str, layer: nn.Module, layout: Layout, files: Mapping[str, InFile], config: ConfigFormat
    ) -> None:
        self._where, self._layer, self._layout, self._files = where, layer, layout, files
        self._slices = {key: each.file.get_slice(f"{base}.{key}") for key, each in files.items()}
        self._headers = {key: (part.get_dtype(), part.get_shape()) for key, part in self._slices.items()}
        tensors = self._tensors()
        for key, held in tensors.items():
            if isinstance(held.parameters[0], QuantizedStack):
                self._check_format(key, held.parameters[0])
        # One matrix of each quantized weight with the parts that the checkpoint has, on the meta device.
        self._templates = {
            key: template(held, self._headers, key)
            for key, held in tensors.items()
            if isinstance(held.parameters[0], QuantizedStack)
        }
        self._check_shapes(tensors)
        for key, stack in self._templates.items():
            config.check(self._place(key), stack)
            self._check_values(key, tensors[key])
        self._scales = self._scales_of_parameters(tensors)

    def read(self) -> None:
        """Copy the tensors into the layer, one expert at a time."""
        for name, like in self._scales.items():
            self._prepare(name, like)
        for key, held in self._tensors().items():
            for index, parameters in experts_of(held):
                for view, parameter in zip(held.entry.views(self._weight(key, index)), parameters, strict=True):
                    parameter.copy_(view)

    def _tensors(self) -> dict[str, Held]:
        return self._layout.tensors(state_with_stacks(self._layer))

    def _place(self, key: str) -> str:
        """Return checkpoint, name and file of a weight, for messages."""
        names = [name for name in self._files if name.startswith(key)]
        files = sorted({self._files[name].path.name for name in names})
        return f"{self._where}: {key} in {' and '.join(files) or 'no file'}"

    def _check_format(self, key: str, stack: QuantizedStack) -> None:
        published(stack, f"{self._where}: the experts of the layer")
        found = format_in(key, {name: dtype for name, (dtype, _) in self._headers.items()})
        if found != stack.format:
            raise ValueError(
                f"{self._place(key)} must be quantized as {stack.format}, as the experts of the layer are, got "
                f"{found or 'weights that are not quantized'}"
            )

    def _check_shapes(self, tensors: Mapping[str, Held]) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, tuple[str, ...]] = {}
        for key, held in tensors.items():
            if key not in self._templates:
                expected[key], dtypes[key] = held.shape, _FLOATS
                continue
            stack = self._templates[key]
            leading = held.parameters[0].shape[:1] if held.entry.is_stack else ()
            form = published(stack, key)
            for end, tensor in form.tensors(stack).items():
                expected[f"{key}{end}"] = (*leading, *tensor.shape)
                dtypes[f"{key}{end}"] = form.dtypes[end]
        check_tensors(self._where, {key: shape for key, (_, shape) in self._headers.items()}, expected)
        for key, (dtype, _) in self._headers.items():
            if dtype not in dtypes[key]:
                remedy = "; dequantise it first" if dtypes[key] == _FLOATS else ""
                raise ValueError(f"{self._where}: {key} must be of {', '.join(dtypes[key])}, got {dtype}{remedy}")

    def _check_values(self, key: str, held: Held) -> None:
        """Read everything but the codes."""
        stack = self._templates[key]
        form = published(stack, key)
        names = {end: name for end, name in [*form.names(key).items()][1:] if name in self._slices}
        for index, _ in experts_of(held):
            try:
                form.check({end: self._slices[name][index] for end, name in names.items()}, stack)
            except ValueError as error:
                expert = "" if index is ... else f" of expert {index}"
                raise ValueError(f"{self._place(key)}{expert}: {error}") from error

    def _scales_of_parameters(self, tensors: Mapping[str, Held]) -> dict[str, QuantizedStack]:
        """Return a matrix with the dtype of scales, group size and zero points of each quantized parameter."""
        like: dict[str, QuantizedStack] = {}
        for key, stack in self._templates.items():
            for name in tensors[key].entry.names:
                first = like.setdefault(name, stack)
                if _scales(first) != _scales(stack):
                    raise ValueError(
                        f"{self._place(key)} must have scales as the other experts, {_scales(first)}, got "
                        f"{_scales(stack)}"
                    )
        return like

    def _prepare(self, name: str, like: QuantizedStack) -> None:
        """Replace a parameter that has no memory, or other scales than the checkpoint."""
        path, _, last = name.rpartition(".")
        owner = self._layer.get_submodule(path)
        old = getattr(owner, last)
        if not old.is_meta and _scales(old) == _scales(like):
            return
        device = "cpu" if old.is_meta else old.device
        codes = torch.empty_like(old.codes, device=device) if old.is_meta else old.codes
        shape = (*old.scales.shape[:-1], like.scales.shape[-1])
        scales = torch.zeros(shape, dtype=like.scales.dtype, device=device)
        zeros = None if like.zeros is None else torch.zeros_like(scales, dtype=torch.uint8)
        put_stack(owner, last, old.map(codes=codes, scales=scales, zeros=zeros))

    def _weight(self, key: str, index: Any) -> Any:
        """Return one weight of the checkpoint, or that of one expert in a stack."""
        if key not in self._templates:
            return self._slices[key][index]
        stack = self._templates[key]
        form = published(stack, key)
        tensors = {end: self._slices[name][index] for end, name in form.names(key).items() if name in self._slices}
        codes, scales, zeros = form.parts(tensors, stack.columns)
        return stack.map(codes=codes, scales=scales, zeros=zeros)


def experts_of(held: Held) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the index and the parameters of each expert in a stack, or of a whole tensor that is none."""
    if not held.entry.is_stack:
        yield ..., held.parameters
        return
    for expert in range(held.parameters[0].shape[0]):
        yield expert, [parameter[expert] for parameter in held.parameters]


def _scales(stack: QuantizedStack) -> str:
    return f"{stack.scales.dtype}, one per {stack.columns_per_scale}" + (", zeros" if stack.zeros is not None else "")
