"""Adapters of models of transformers in the files that inference servers read, with the names of published checkpoints.

E experts, F intermediate_size, r the rank. Servers have matrices [out, in], as `torch.nn.Linear`, and compute
W + scale * B A with A [r, in] and B [out, r].
"""

import json
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from maxmoe.adapters import adapted_module
from maxmoe.adapters.served import ServedAdapter, served_adapter
from maxmoe.convert.blocks import family_of_block
from maxmoe.declaration import FusedGate, gate_up_slices
from maxmoe.families.family import Family
from maxmoe.files import replacing
from maxmoe.integrations.transformers._transformers import is_experts
from maxmoe.integrations.transformers.moe_block import TransformersMoE
from maxmoe.ops import LowRankFactors

ServedLayout = Literal["per_expert", "vllm_stacked", "sglang_stacked"]
_PREFIX = "base_model.model."  # of PEFT, in every name of a file


class _Factors(NamedTuple):
    """Factors of one projection of all experts."""

    a: Tensor  # [E, r, in]
    b: Tensor  # [E, out, r]


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
            ``(E, r, in)`` and so on.
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
    for path, factors in parts.experts.items():
        tensors.update(blocks[path].tensors(factors))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "adapter_model.safetensors") as new:
        owned = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        save_file(owned, new, {"format": "pt"})
    with replacing(folder / "adapter_config.json") as new:
        projections = set[str]().union(*(block.projections for block in blocks.values()))
        new.write_text(json.dumps(_config(parts, projections), indent=2, sort_keys=True))


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
        self._check()

    def _check(self) -> None:
        experts, layout = self.experts, self._layout
        kind = f"{type(experts).__name__} of {self.path}"
        if layout == "per_expert" and self._names() is None:
            raise ValueError(f"layout 'per_expert' needs published names of the matrices of an expert; {kind} has none")
        if layout != "per_expert" and not experts.has_gate:
            raise ValueError(f"layout {layout!r} needs experts with a gate, {kind} has none: use 'per_expert'")
        if layout == "sglang_stacked" and not experts.is_concatenated:
            raise ValueError(f"layout 'sglang_stacked' needs the gate before up, in {kind} they alternate")
        if layout == "vllm_stacked" and experts.config.model_type.startswith("gemma4"):
            raise ValueError(f"vLLM leaves out stacked adapters of {kind} (vllm-project/vllm#41754)")

    @property
    def projections(self) -> Set[str]:
        """Names of the projections of an expert."""
        return {"gate_proj", "up_proj", "down_proj"} if self.experts.has_gate else {"up_proj", "down_proj"}

    def _names(self) -> dict[str, str] | None:
        """Return the published name of each projection of an expert, with "{expert}"; None for stacks."""
        if self.family is None:
            return None
        entries = [entry for entry in self.family.checkpoint.entries if entry.is_of_experts]
        names = {entry.names[0].removeprefix("experts."): entry.key.removesuffix(".weight") for entry in entries}
        return names if all("{expert}" in name for name in names.values()) else None

    def published(self, name: str) -> str:
        """Return a name in this block as published checkpoints have it."""
        if self.family is None:
            return name
        parent = self.path.rpartition(".")[0]
        return f"{_PREFIX}{parent}.{self.family.checkpoint.module}{name.removeprefix(_PREFIX + self.path)}"

    def tensors(self, factors: Mapping[str, LowRankFactors]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the experts by name. A projection without an adapter has factors of zero."""
        base, first = self.published(f"{_PREFIX}{self.path}"), "gate_up_proj" if self.experts.has_gate else "up_proj"
        others = sorted(set(factors) - {first, "down_proj"})
        if others:
            raise ValueError(
                f"servers read adapters of {first} and down_proj of {self.path}.{self._name}, got {others}"
            )
        up, down = (self._factors(factors, name) for name in (first, "down_proj"))
        match self._layout:
            case "per_expert":
                named = {"up_proj": up, "down_proj": down}
                if self.experts.has_gate:
                    gate: FusedGate = "concatenated" if self.experts.is_concatenated else "interleaved"
                    halves = gate_up_slices(up.b.shape[1], gate)
                    named |= {
                        name: _Factors(up.a, up.b[:, half])
                        for name, half in zip(("gate_proj", "up_proj"), halves, strict=True)
                    }
                names = self._names() or {}
                for projection, (a, b) in named.items():
                    for expert in range(len(a)):
                        name = f"{base}.{names[projection].format(expert=expert)}"
                        yield from _pair(name, a[expert], b[expert])
            case "vllm_stacked":
                for name, (a, b) in {".base_layer": up, "": down}.items():
                    yield from _pair(f"{base}.{self._name}{name}", a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))
            case "sglang_stacked":
                for name, (a, b) in {"gate_up_proj": up, "down_proj": down}.items():
                    yield from _pair(f"{base}.{self._name}.{name}", a, b)

    def _factors(self, factors: Mapping[str, LowRankFactors], name: str) -> _Factors:
        """Return the factors of a projection, given the factors in the layout of its parameter."""
        if name not in factors:
            like, (count, *matrix) = next(iter(factors.values())).a, getattr(self.experts, name).shape
            size_in, size_out = matrix if self.experts.is_transposed else reversed(matrix)
            rank = like.shape[2]
            return _Factors(like.new_zeros(count, rank, size_in), like.new_zeros(count, size_out, rank))
        a, b, _ = factors[name] if self.experts.is_transposed else factors[name].transposed()
        return _Factors(a.mT, b.mT)


def _pair(name: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.lora_A.weight", a
    yield f"{name}.lora_B.weight", b


def _config(parts: ServedAdapter, projections: Set[str]) -> dict[str, Any]:
    """Return the config of the exported adapter: its modules by name, one rank and one scale.

    SGLang knows the projections of experts by these names whatever the names of the tensors are, and computes the scale
    as lora_alpha / r also with use_rslora.
    """
    alpha = parts.scale * parts.rank
    of_others = {name.split(".lora_")[0].rpartition(".")[2] for name in parts.others}
    return {
        **{key: parts.config.get(key) for key in ("base_model_name_or_path", "task_type", "revision")},
        "peft_type": "LORA",
        "r": parts.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": sorted(of_others | projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
