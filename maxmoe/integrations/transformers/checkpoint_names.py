"""State dicts with the names of published checkpoints, which `save_pretrained` writes, for replaced blocks.

`from_pretrained` converts them; `load_state_dict`, which `transformers.Trainer` calls to resume and for the best model,
does not, and leaves the experts as they are. A hook of the decoder layer does it here.
"""

from typing import Any

from torch import Tensor, nn

from maxmoe.checks.whole_tensors import is_dtensor
from maxmoe.convert.stored_weights import StoredWeight
from maxmoe.integrations.transformers.moe_block import TransformersMoE


def load_checkpoint_names(layer: nn.Module) -> None:
    """Let `load_state_dict` of a decoder layer read the published names of the weights of its replaced block."""
    layer.register_load_state_dict_pre_hook(_copy_published)  # type: ignore[no-untyped-call]


def _copy_published(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, *messages: list[str]
) -> None:
    """Copy what has a published name into the parameters, one tensor at a time: a file may have a part of them."""
    for name, block in layer.named_children():
        if not isinstance(block, TransformersMoE) or block.family.checkpoint is block.family.block:
            continue
        family, own = block.family, block.state_dict()
        entries = [entry for entry in family.block.entries if entry.key in own or not entry.is_optional]
        # Not in a block that is sharded, adapted or quantized.
        if any(entry.key not in own or own[entry.key].is_meta or is_dtensor(own[entry.key]) for entry in entries):
            continue
        views: dict[str, Tensor] = {}
        for entry in entries:
            views.update(zip(entry.names, entry.views(own[entry.key]), strict=True))
        base, own_base = f"{prefix}{family.checkpoint.prefix}", f"{prefix}{name}."
        own_names = {f"{own_base}{key}" for key in own}
        copied, missing = set[str](), set[str]()
        for key, held in family.checkpoint.tensors(views).items():
            tensor = None if base + key in own_names else state_dict.pop(base + key, None)
            if tensor is None:
                missing.update(held.entry.names)
            elif tensor.shape != held.shape:
                expected, got = tuple(held.shape), tuple(tensor.shape)
                messages[-1].append(f"size mismatch for {base}{key}: must be {expected}, got {got}")
            else:
                copied.update(held.entry.names)
                StoredWeight(key, held).read({key: tensor})
        for entry in entries:
            if copied - missing >= {*entry.names}:  # complete: copied onto itself
                state_dict[f"{own_base}{entry.key}"] = own[entry.key]
