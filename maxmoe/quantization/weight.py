"""Quantized weights of modules: their codes, scales and zero points are ordinary frozen parameters."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakIdKeyDictionary

from maxmoe._torch import ConvertedModule, parameter_table
from maxmoe.checks.whole_tensors import check_whole, is_dtensor
from maxmoe.quantization.formats import format_named
from maxmoe.quantization.stack import PARTS, QuantizedStack


class QuantizedWeight(ConvertedModule, QuantizedStack):
    """A quantized stack whose codes, scales and zero points are parameters, in the place of a weight of a module.

    `module.up_proj` is then a `QuantizedStack` of what its parameters are at the time: on a mesh shards between the
    steps, gathered tensors in the forward. They are `up_proj.mxfp4_codes`, `up_proj.scales`, and `up_proj.zeros` or
    `up_proj.row_scales` in formats that have them. The format is in the name of the codes, because a checkpoint in
    another format may have the same shapes. Conversions to another dtype change `dtype` alone: the dtype of the scales
    belongs to the format::

        module.up_proj = QuantizedWeight(quantize(weights, "mxfp4"))

    Args:
        stack: matrices ``(L, in, out)`` or ``(L, out, in)``, whose memory the parameters share.

    Raises:
        ValueError: for a single matrix.
    """

    def __init__(self, stack: QuantizedStack) -> None:
        super().__init__()
        if stack.dim() != 3:
            raise ValueError(f"stack must be of matrices, of shape (L, in, out), got {tuple(stack.shape)}")
        self.format, self.is_transposed, self.dtype = stack.format, stack.is_transposed, stack.dtype
        self._columns, self._codes_name = stack.columns, f"{stack.format}_codes"
        for name in PARTS:
            part = getattr(stack, name)
            parameter = None if part is None else nn.Parameter(part, requires_grad=False)
            parameter_table(self)[self.parameter_name(name)] = parameter
        self.register_load_state_dict_pre_hook(_check_loaded)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        _copy_in_averages()  # which are made of a copy
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    @property
    def codes(self) -> Tensor:  # type: ignore[override]
        """Codes."""
        return parameter_table(self)[self._codes_name]  # type: ignore[no-any-return]

    # `nn.Module.__getattr__` is called after an exception, which takes more time than all else in these properties.
    @property
    def scales(self) -> Tensor:  # type: ignore[override]
        """Scales."""
        return parameter_table(self)["scales"]  # type: ignore[no-any-return]

    @property
    def zeros(self) -> Tensor | None:  # type: ignore[override]
        """Zero points, or None."""
        return parameter_table(self)["zeros"]  # type: ignore[no-any-return]

    @property
    def row_scales(self) -> Tensor | None:  # type: ignore[override]
        """What the scales of each row are multiplied by, or None."""
        return parameter_table(self)["row_scales"]  # type: ignore[no-any-return]

    @property
    def columns(self) -> int:  # type: ignore[override]
        """Number of columns of the matrices; of a shard of them, which consists of whole blocks, fewer."""
        known, num_bytes = format_named(self.format), self.codes.shape[-1]
        return self._columns if num_bytes == known.bytes_per_row(self._columns) else num_bytes * 8 // known.bits

    def parameter_name(self, part: str) -> str:
        """Return the name of the parameter with a part."""
        return self._codes_name if part == "codes" else part

    def dim(self) -> int:
        """Return 3."""
        return 3

    def conversion(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Keep the dtype of the scales; change the dtype of the stack alone."""
        self.dtype = function(torch.empty(0, dtype=self.dtype)).dtype
        scales = (self.scales, self.row_scales)

        def convert(tensor: Tensor) -> Tensor:
            converted = function(tensor)
            is_rounded = any(tensor is each for each in scales) and converted.dtype != tensor.dtype
            return tensor.to(converted.device) if is_rounded else converted

        return convert

    def extra_repr(self) -> str:
        """Shape, format, block and dtype, for `print`."""
        return self.description()


def _check_loaded(
    weight: QuantizedWeight, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: object
) -> None:
    """Raise for scales that are not finite, or of another dtype than those into which they would be copied."""
    scales, *others = (state_dict.get(f"{prefix}{name}") for name in PARTS[1:])
    if scales is None or scales.is_meta or is_dtensor(scales):
        return
    for name, given in zip(("scales", "row_scales"), (scales, others[-1]), strict=True):
        own = getattr(weight, name)
        is_copied = given is not None and own is not None and not metadata.get("assign_to_params_buffers")
        if is_copied and given.dtype != own.dtype:
            raise ValueError(f"{prefix}{name} must be {own.dtype}, as in the module, got {given.dtype}")
    try:
        format_named(weight.format).check_values(scales, *others)
    except ValueError as error:
        raise ValueError(f"{prefix.removesuffix('.')}: {error}") from error


@functools.cache
def _copy_in_averages() -> None:
    """Let every `AveragedModel` copy quantized weights: torch averages integers as real numbers, and rounds down."""
    update = AveragedModel.update_parameters

    @functools.wraps(update)
    @torch.no_grad()
    def updated(averages: AveragedModel, model: nn.Module) -> None:
        update(averages, model)
        for average, module in zip(averages.module.modules(), model.modules(), strict=False):
            if isinstance(average, QuantizedWeight) and isinstance(module, QuantizedWeight):
                average.copy_(module)

    AveragedModel.update_parameters = updated  # type: ignore[assignment,method-assign]


def put_stack(owner: nn.Module, name: str, stack: QuantizedStack) -> None:
    """Put a quantized weight in the place of a weight of a module."""
    delattr(owner, name)
    setattr(owner, name, stack if isinstance(stack, QuantizedWeight) else QuantizedWeight(stack))


def dequantize_experts(model: nn.Module) -> None:
    """Replace the quantized weights of a model by ordinary frozen parameters, in place.

    The inverse of `maxmoe.quantize_experts`, up to the rounding of the format. The outputs have the same bits. PEFT
    merges adapters into the weights then::

        dequantize_experts(model)
        model = model.merge_and_unload()

    Each quantized weight is freed as soon as it has been replaced. The peak memory is the model with the weights in
    their dtype plus the largest of them.

    Args:
        model: model with quantized weights, not sharded, with or without adapters.

    Raises:
        ValueError: for a model without quantized weights, or with sharded ones. Nothing has been changed then.
    """
    codes = {path: weight.codes for path, weight in quantized_weights(model)}
    if not codes:
        raise ValueError(f"the model must have quantized weights, got none in {type(model).__name__}")
    check_whole("dequantize_experts", codes)
    paths = [*codes]
    del codes  # otherwise they would be held
    known = WeakIdKeyDictionary()  # by the quantized weight, which several modules may share
    for path in paths:
        owner, _, name = path.rpartition(".")
        module, weight = model.get_submodule(owner), model.get_submodule(path)
        assert isinstance(weight, QuantizedWeight)
        if weight not in known:
            known[weight] = nn.Parameter(weight.dequantize().contiguous(), requires_grad=False)
        delattr(module, name)
        module.register_parameter(name, known[weight])
        del weight  # otherwise it would be held while the next one is replaced


def on_meta(weight: Any) -> Any:
    """Return a weight without memory."""
    return weight.map(on_meta) if isinstance(weight, QuantizedStack) else torch.empty_like(weight, device="meta")


def quantized_weights(module: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield all quantized weights in a module with their paths, also those that others share."""
    for path, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, QuantizedWeight):
            yield path, child


def weights(module: nn.Module, *, recurse: bool = True) -> Iterator[Tensor | QuantizedStack]:
    """Yield the parameters of a module, with quantized weights in the place of their parts."""
    seen: set[int] = set()
    for owner in module.modules() if recurse else (module,):
        for weight in (owner,) if isinstance(owner, QuantizedWeight) else owner.parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield weight


def state_with_stacks(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of a module, not detached, with quantized weights in the place of their parts."""
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for path, weight in quantized_weights(module):
        for name, _ in weight.named_parameters():
            del state[f"{path}.{name}"]
        state[path] = weight
    return state


@dataclass(frozen=True)
class StackPart:
    """A parameter that is a part of a quantized weight.

    Args:
        part: "codes", "scales", "zeros" or "row_scales".
        format: name of the format.
        sizes: number of rows and of columns of the matrices.
        block: number of rows and of columns that share a scale, of rows for "row_scales".
        is_transposed: whether the dims of the stack are the columns and the rows, in this order.
    """

    part: str
    format: str
    sizes: tuple[int, int]
    block: tuple[int, int]
    is_transposed: bool

    def names(self, of_stack: tuple[str | None, ...]) -> tuple[str | None, ...]:
        """Return the logical names of the dims of the part, given the names of the stack.

        A scale of all rows or columns is needed with every shard of them, so that this dim has no name.
        """
        expert, *dims = of_stack
        rows, columns = reversed(dims) if self.is_transposed else dims
        if self.part == "codes":
            return expert, rows, columns
        names = zip((rows, columns), self.sizes, self.block, strict=True)
        return expert, *(name if size > block else None for name, size, block in names)


def stack_parts(module: nn.Module) -> dict[str, dict[str, StackPart]]:
    """Return, for each quantized weight in a module by its path, its parts by the paths of their parameters."""
    return {
        path: {
            f"{path}.{weight.parameter_name(part)}": StackPart(
                part,
                weight.format,
                (weight.rows, weight.columns),
                (1, weight.columns) if part == "row_scales" else (weight.rows_per_scale, weight.columns_per_scale),
                weight.is_transposed,
            )
            for part in weight.parts()
        }
        for path, weight in quantized_weights(module)
    }
