"""Moves weights between a `maxmoe.MoE` layer and the sparse block of a transformers model.

Weights are moved one tensor at a time: the tensor is copied to the other layout, and then released in its source. The
peak memory is the model plus one tensor. transformers need not be installed.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.checks.whole_tensors import check_whole
from maxmoe.config import MoEConfig
from maxmoe.families.configs import converted, family_of
from maxmoe.families.family import Family
from maxmoe.families.layouts import Held, check_tensors
from maxmoe.quantization import QuantizedStack, on_meta, put_stack, state_with_stacks

# Fields of MoEConfig that a transformers block leaves to the training loop.
TRAINING_FIELDS = (
    "load_balance_loss_weight",
    "load_balance_scope",
    "router_z_loss_weight",
    "correction_bias_rule",
    "correction_bias_update_rate",
    "buffer_factor",
    "overflow",
)
# All fields that need not agree with the config of a block.
_OTHER_FIELDS = (*TRAINING_FIELDS, "router", "implementation", "capacity_factor")


def config_of_block(block: nn.Module) -> MoEConfig:
    """Return the config of the layer that computes the same as a sparse block of a transformers model."""
    source, fields = _source(block), family_of_block(block).layer_fields
    return converted(source, {name: field.of_block(source, block) for name, field in fields.items()})


def family_of_block(block: nn.Module) -> Family:
    """Return the family of a sparse block of a transformers model."""
    return family_of(_source(block))


def _source(block: nn.Module) -> Any:
    """Return the transformers config that a sparse block or one of its children keeps."""
    for module in block.modules():
        if hasattr(module, "config"):
            return module.config
    raise ValueError(
        f"{type(block).__name__} must be the sparse block of a model of transformers >= 5.20, with its config; no "
        "submodule has a config: if the block is from such a model, set block.config = model.config"
    )


def check_block(config: MoEConfig, block: nn.Module) -> None:
    """Raise unless a layer with this config and a block compute the same function of the same weights."""
    wanted = config_of_block(block)
    family_of_block(block).check_convertible()
    compared = (field.name for field in dataclasses.fields(MoEConfig) if field.name not in _OTHER_FIELDS)
    for name in (*compared, "router_rule"):
        if getattr(config, name) != getattr(wanted, name):
            raise ValueError(
                f"{name} of the layer must be {getattr(wanted, name)!r} as in the block's config, "
                f"got {getattr(config, name)!r}"
            )


def check_tensors_of(block: nn.Module, layer: nn.Module, what: str) -> dict[str, Held]:
    """Return the parameters of a layer in each tensor of a block; raises unless the block has these tensors, whole."""
    check_whole(what, block.state_dict())
    family, theirs = family_of_block(block), state_with_stacks(block)
    if family.lies_in_layer:
        theirs = {key: tensor for key, tensor in theirs.items() if family.block.has(key)}
    tensors = family.block.tensors(state_with_stacks(layer))
    expected = {key: held.shape for key, held in tensors.items()}
    expected |= {name: theirs[name].shape for name in family.own_parameters if name in theirs}
    for key, held in tensors.items():
        if held.entry.has_unused_matrices and key in theirs:
            expected[key] = torch.Size([max(theirs[key].shape[0], held.shape[0]), *held.shape[1:]])
    where = f"{type(block).__name__} against the block of transformers >= 5.20"
    check_tensors(where, {key: tensor.shape for key, tensor in theirs.items()}, expected)
    return tensors


@torch.no_grad()
def take_weights(layer: nn.Module, block: nn.Module) -> None:
    """Move the weights of a block into a layer; the block is left on the meta device."""
    family_of_block(block).check_convertible()
    tensors, theirs = check_tensors_of(block, layer, "from_transformers"), state_with_stacks(block)
    for key, held in tensors.items():
        source = theirs.pop(key)
        used = source[: held.parameters[0].shape[0]] if held.entry.has_unused_matrices else source
        for name, view in zip(held.entry.names, held.views(used), strict=True):
            _put(layer, name, _owned(view, source), source.requires_grad)
        _put(block, key, on_meta(source), source.requires_grad)


@torch.no_grad()
def give_weights(layer: nn.Module, block: nn.Module) -> None:
    """Move the weights of a layer into a block; the layer is left on the meta device."""
    check_whole("to_transformers", layer.state_dict())
    tensors = check_tensors_of(block, layer, "to_transformers")
    theirs, buffers = state_with_stacks(block), dict(layer.named_buffers())
    counts = {key: tensor.shape[0] for key, tensor in theirs.items() if key in tensors}
    for key, held in tensors.items():
        _joined(key, [on_meta(parameter) for parameter in held.parameters], held, counts[key])
    for key, held in tensors.items():
        requires_grad = any(parameter.requires_grad for parameter in held.parameters)
        joined = _joined(key, held.parameters, held, counts[key])
        if buffers.keys() & held.entry.names:  # a correction bias, which is a parameter in some blocks
            joined = joined.to(theirs[key].dtype)
        _put(block, key, joined, requires_grad)
        for name in held.entry.names:
            _put(layer, name, on_meta(held.parameters.pop(0)), requires_grad)


def _owned(view: Any, source: Any) -> Any:
    """Return a part of a weight in memory of its own; the whole weight as it is."""
    if isinstance(view, QuantizedStack):
        return view.map(torch.Tensor.contiguous)
    is_whole = view.is_contiguous() and view.numel() == source.numel()
    return view if is_whole else view.clone(memory_format=torch.contiguous_format)


def _joined(key: str, parameters: list[Any], held: Held, count: int) -> Any:
    """Return a tensor of a block, with matrices that the block does not use up to their number in the block."""
    weight: Any = held.entry.join(parameters)
    missing = count - weight.shape[0]
    if missing and isinstance(weight, QuantizedStack):
        raise ValueError(
            f"{key} has {missing} matrices of zeros that the block does not use, which cannot be quantized as "
            f"{weight.format}: convert the layer before its experts are quantized"
        )
    return torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])]) if missing else weight


def _put(module: nn.Module, name: str, tensor: Tensor | QuantizedStack, requires_grad: bool) -> None:
    """Set a weight or buffer by name; a buffer keeps its dtype, because the correction bias is float32 or wider."""
    path, _, name = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(tensor, QuantizedStack):
        put_stack(owner, name, tensor)
    elif name in dict(owner.named_buffers(recurse=False)):
        setattr(owner, name, tensor.detach().to(owner.get_buffer(name).dtype))
    else:
        setattr(owner, name, nn.Parameter(tensor, requires_grad))
