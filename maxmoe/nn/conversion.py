"""Moving the weights of a layer between `maxmoe.MoE` and the sparse block of a model of transformers.

One tensor at a time: read, written in the other arrangement, and released where it came from. At the most there is one
tensor more than the model has; transformers itself is not needed for it.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from maxmoe.config import MoEConfig
from maxmoe.presets.layouts import Held, Layout, check_tensors

# A block of transformers says nothing of them, or leaves them to the training loop.
_FIELDS_OF_TRAINING = {
    "router",
    "load_balance_loss_weight",
    "load_balance_scope",
    "router_z_loss_weight",
    "correction_bias_update_rate",
    "implementation",
    "capacity_factor",
    "buffer_factor",
}


def config_of(block: nn.Module) -> Any:
    """Find the config of transformers that a block was made from.

    Args:
        block: a sparse block; itself or one of its parts keeps the config.

    Returns:
        The config.

    Raises:
        ValueError: if there is none, as in a transformers too old for us.
    """
    for module in block.modules():
        if hasattr(module, "config"):
            return module.config
    raise ValueError(
        f"{type(block).__name__} must be the sparse block of a model of transformers >= 5.20, whose experts keep their "
        f"config; no part of it has one"
    )


def check_config(ours: MoEConfig, theirs: MoEConfig) -> None:
    """Make sure that a layer and a block compute the same from the same weights.

    Args:
        ours: of the layer.
        theirs: of the block.

    Raises:
        ValueError: if a field differs that is not of the training alone.
    """
    for field in dataclasses.fields(MoEConfig):
        got, wanted = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in _FIELDS_OF_TRAINING and got != wanted:
            raise ValueError(f"{field.name} of the layer must be {wanted!r} as in the block's config, got {got!r}")


def take_weights(layer: nn.Module, block: nn.Module, layout: Layout) -> None:
    """Move the weights of a block into a layer; the block is left on the meta device.

    Args:
        layer: `maxmoe.MoE`; its own weights are dropped.
        block: of transformers.
        layout: of the block.

    Raises:
        ValueError: if the block has other tensors or shapes; then nothing is moved.
    """
    state, theirs = _state(layer), _state(block)
    for key, held in _checked(layout, state, block, theirs).items():
        source = theirs.pop(key)
        for name, view in zip(held.entry.names, held.entry.views(source.detach()), strict=True):
            is_whole = view.is_contiguous() and view.numel() == source.numel()
            weight = view if is_whole else view.clone(memory_format=torch.contiguous_format)
            _put(layer, name, weight, source.requires_grad)
        _put(block, key, torch.empty_like(source, device="meta"), source.requires_grad)


def give_weights(layer: nn.Module, block: nn.Module, layout: Layout) -> None:
    """Move the weights of a layer into a block; the layer is left on the meta device.

    Args:
        layer: `maxmoe.MoE`.
        block: of transformers; its own weights are dropped.
        layout: of the block.

    Raises:
        ValueError: if the block has other tensors or shapes; then nothing is moved.
    """
    state, theirs = _state(layer), _state(block)
    for key, held in _checked(layout, state, block, theirs).items():
        requires_grad = any(parameter.requires_grad for parameter in held.parameters)
        _put(block, key, held.entry.join([parameter.detach() for parameter in held.parameters]), requires_grad)
        for name in held.entry.names:
            _put(layer, name, torch.empty_like(state.pop(name), device="meta"), requires_grad)
        held.parameters.clear()


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers themselves, not detached from them."""
    return module.state_dict(keep_vars=True)


def _checked(layout: Layout, state: dict[str, Tensor], block: nn.Module, theirs: dict[str, Tensor]) -> dict[str, Held]:
    tensors = layout.tensors(state)
    where = f"{type(block).__name__} against that of transformers >= 5.20"
    check_tensors(where, {key: tensor.shape for key, tensor in theirs.items()}, tensors)
    return tensors


def _put(module: nn.Module, name: str, tensor: Tensor, requires_grad: bool) -> None:
    """A parameter brings its dtype with it, a buffer takes that of the module: ours is float32 or wider."""
    path, _, name = name.rpartition(".")
    owner = module.get_submodule(path)
    if name in dict(owner.named_buffers(recurse=False)):
        setattr(owner, name, tensor.to(owner.get_buffer(name).dtype))
    else:
        setattr(owner, name, nn.Parameter(tensor, requires_grad))
