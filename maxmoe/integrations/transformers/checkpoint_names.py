"""State dicts with the names of published checkpoints, which `save_pretrained` writes, for replaced blocks.

`from_pretrained` converts them; `load_state_dict`, which `transformers.Trainer` calls to resume and for the best model,
does not, and leaves the experts as they are. A hook of the decoder layer does it here.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from maxmoe.checks.whole_tensors import is_dtensor
from maxmoe.integrations.transformers.moe_block import TransformersMoE
from maxmoe.presets.layouts import Entry, Layout


def load_checkpoint_names(layer: nn.Module) -> None:
    """Let `load_state_dict` of a decoder layer read the published names of the weights of its replaced block."""
    layer.register_load_state_dict_pre_hook(_copy_published)  # type: ignore[no-untyped-call]


def _copy_published(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, *messages: list[str]
) -> None:
    """Copy what has a published name into the parameters, one tensor at a time: a file may have a part of them."""
    for name, block in layer.named_children():
        if not isinstance(block, TransformersMoE):
            continue
        family, own = block.family, block.state_dict()
        views = _views(family.block, own)
        if family.checkpoint is family.block or not views:
            continue
        base = f"{prefix}{family.checkpoint.module}."
        copied, missing = set[str](), set[str]()
        for key, entry, targets in _published(family.checkpoint, views):
            is_own_name = base == f"{prefix}{name}." and key in own
            tensor = None if is_own_name else state_dict.pop(base + key, None)
            if tensor is None:
                missing.update(entry.names)
                continue
            expected = entry.shape(targets[0].shape)
            if tensor.shape != expected:
                got = tuple(tensor.shape)
                messages[-1].append(f"size mismatch for {base}{key}: must be {tuple(expected)}, got {got}")
                continue
            copied.update(entry.names)
            for target, view in zip(targets, entry.views(tensor), strict=True):
                target.copy_(view)
        for entry in family.block.entries:
            if copied - missing >= {*entry.names}:  # complete: copied onto itself
                state_dict[f"{prefix}{name}.{entry.key}"] = own[entry.key]


def _views(layout: Layout, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the tensors of a block by the names of maxmoe; none if it is sharded, adapted or quantized."""
    views: dict[str, Tensor] = {}
    for entry in layout.entries:
        tensor = own.get(entry.key)
        if tensor is not None and not (tensor.is_meta or is_dtensor(tensor)):
            views.update(zip(entry.names, entry.views(tensor), strict=True))
        elif entry.is_of_experts:
            return {}
    return views


def _published(layout: Layout, views: dict[str, Tensor]) -> Iterator[tuple[str, Entry, list[Tensor]]]:
    """Yield the published names, one for each expert, with the views that the tensors belong to."""
    for entry in layout.entries:
        targets = [views[name] for name in entry.names if name in views]
        if not targets:
            continue
        if "{expert}" not in entry.key:
            yield entry.key, entry, targets
            continue
        for expert in range(len(targets[0])):
            yield entry.key.format(expert=expert), entry, [target[expert] for target in targets]
