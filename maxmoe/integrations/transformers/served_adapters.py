"""Adapters of models of transformers in the files that inference servers read, with the names of published checkpoints.

E experts, F intermediate_size, r the rank. Servers have matrices [out, in], as `torch.nn.Linear`, and compute
W + scale * B A with A [r, in] and B [out, r].
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from maxmoe.adapters import adapted_module
from maxmoe.adapters.layouts import ExpertNames, Experts, Factors, arranged, filled, padded, tensors_of, unified
from maxmoe.adapters.served import ServedAdapter, served_adapter, served_config
from maxmoe.convert.blocks import family_of_block
from maxmoe.declaration import FusedGate
from maxmoe.families.family import Family
from maxmoe.files import replacing
from maxmoe.integrations.transformers._transformers import is_experts
from maxmoe.integrations.transformers.moe_block import TransformersMoE

ServedLayout = Literal["per_expert", "vllm_stacked", "sglang_stacked", "shared_outer"]
_PREFIX = "base_model.model."  # of PEFT, in every name of a file


@torch.no_grad()
def export_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    layout: ServedLayout,
    adapter: str | None = None,
) -> None:
    """Write an adapter of PEFT, with its factors beside experts, as inference servers name and stack them.

    Servers read one rank and one scale. Where they differ between modules, factors get rows of zeros up to the highest
    rank, and other scales are multiplied into B, which rounds it once unless the quotient is a power of two.

    PEFT's own file has all experts of a layer in tensors with names that servers do not know: they leave out the
    adapters of the experts. Everything that a server would leave out or misread raises here::

        model = PeftModel.from_pretrained(model, "trained")
        export_adapter(model, "served", layout="per_expert")

    Args:
        model: model of PEFT around a model of transformers, with blocks of its own or replaced ones.
        folder: folder for ``adapter_model.safetensors`` and ``adapter_config.json``.
        layout: "per_expert": ``experts.0.gate_proj.lora_A.weight`` ``(r, in)`` and so on, with the names of the
            published checkpoint, for vLLM and SGLang. "vllm_stacked": all experts in one tensor, for the models of vLLM
            whose class has ``is_3d_moe_weight``. "sglang_stacked": ``experts.gate_up_proj.lora_A.weight``
            ``(E, r, in)`` and so on, with ``(1, r, in)`` for factors of the hidden size that the experts share.
            "shared_outer": such adapters alone, ``experts.w1.lora_A.weight`` and so on, for vLLM and SGLang.
        adapter: name of the adapter; by default the active one.

    Raises:
        ValueError: for a layout that the family does not have; for a model that is sharded or not of PEFT; and for
            other parts than factors of linear modules and of experts:
            `modules_to_save`, biases, DoRA, routers, weights that the initialization has changed. Nothing has been
            written then.

    Source: vllm/lora/model_manager.py and lora_model.py; sglang/srt/lora/lora.py and mem_pool.py.
    """
    if layout not in get_args(ServedLayout):
        raise ValueError(f"layout must be one of {', '.join(get_args(ServedLayout))}, got {layout!r}")
    parts = served_adapter(model, adapter)
    blocks = {path: _Block(model, path, layout) for path in parts.experts}
    tensors: dict[str, Tensor] = {}
    for name, tensor in parts.others.items():
        block = next((each for each in blocks.values() if name.startswith(f"{_PREFIX}{each.path}.")), None)
        tensors[name if block is None else block.published(name)] = tensor
    experts = {path: block.arranged(parts, path) for path, block in blocks.items()}
    for path, factors in unified(layout, experts, "export_adapter").items():
        base = f"{blocks[path].published(f'{_PREFIX}{path}'.rpartition('.')[0])}."
        tensors.update(tensors_of(layout, base, factors, blocks[path].names))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "adapter_model.safetensors") as new:
        owned = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        save_file(owned, new, {"format": "pt"})
    with replacing(folder / "adapter_config.json") as new:
        projections = {name for block in blocks.values() for name in block.names.projections}
        modules = {name.split(".lora_")[0] for name in parts.others}
        config = served_config(parts.config, parts.rank, parts.scale, modules, projections)
        new.write_text(json.dumps(config, indent=2, sort_keys=True))


class _Block:
    """A sparse block of transformers whose experts have an adapter."""

    def __init__(self, model: Any, experts_path: str, layout: ServedLayout) -> None:
        self.path, _, self._name = experts_path.rpartition(".")
        self._layout = layout
        block = model.get_base_model().get_submodule(self.path)
        self.experts: Any = adapted_module(block.get_submodule(self._name))
        if not is_experts(self.experts):
            raise ValueError(
                f"{experts_path} must be experts of transformers with an interface for implementations, got "
                f"{type(self.experts).__name__}"
            )
        self.family: Family | None = None  # of a block without a preset
        with suppress(ValueError):
            self.family = block.family if isinstance(block, TransformersMoE) else family_of_block(block)
        self.names = self._names()
        self.names.check(layout)

    def _names(self) -> ExpertNames:
        """Return the names of the family, if it has a preset, and the orders of these experts."""
        experts = self.experts
        gate: FusedGate = "concatenated" if experts.has_gate and experts.is_concatenated else "interleaved"
        return ExpertNames(
            model=f"{type(experts).__name__} of {self.path}",
            gate=gate if experts.has_gate else None,
            published=None if self.family is None else self.family.published_experts,
            vllm_refuses_stacks=experts.config.model_type.startswith("gemma4"),
        )

    def published(self, name: str) -> str:
        """Return a name in this block as published checkpoints have it."""
        if self.family is None:
            return name
        parent = self.path.rpartition(".")[0]
        block = ".".join(filter(None, (parent, self.family.published_block)))
        return f"{_PREFIX}{block}{name.removeprefix(_PREFIX + self.path)}"

    def arranged(self, parts: ServedAdapter, path: str) -> Experts:
        """Return the factors of the block with one rank and scale, as the layout has them.

        A projection without an adapter has factors of zero.
        """
        factors = parts.experts[path]
        names = "gate_up_proj" if self.experts.has_gate else "up_proj", "down_proj"
        others = sorted(set(factors) - {*names})
        if others:
            raise ValueError(
                f"servers read adapters of {names[0]} and down_proj of {self.path}.{self._name}, got {others}"
            )
        experts: dict[str, Factors] = {}
        for name, each in factors.items():
            a, b, scale = each if self.experts.is_transposed else each.transposed()
            experts[name] = Factors(a.mT, b.mT * (scale / parts.scale))
        experts = {name: padded(each, parts.rank) for name, each in filled(experts, self.names).items()}
        return arranged(self._layout, experts, self.names)
