"""A file with an adapter, as PEFT, vLLM, SGLang and others write it: what it holds, told from names and shapes.

Tensors are read when they are asked for. Nothing in a file is executed: safetensors and JSON alone are read.
"""

import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from maxmoe.adapters.layouts import W123, AdapterLayout, ExpertNames, Factors, unpacked
from maxmoe.families.configs import family_of
from maxmoe.families.family import Family
from maxmoe.text_table import listed

PREFIX = "base_model.model."  # of PEFT, in every name of a file
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>A\.weight|B\.weight|embedding_A|embedding_B)")
_EXPERTS = re.compile(r"(?P<block>.*?)(?P<key>experts(?P<levels>(\.base_layer)*)|experts\.(\w+\.)?(?P<name>\w+))")
_EXPERT = re.compile(r"experts\.(?:expert_)?(?P<expert>\d+)\.(?P<name>\w+)")
_PROJECTIONS = {theirs: ours for ours, theirs in W123.items()} | {name: name for name in ("gate_up_proj", *W123)}
# Of a marker that Unsloth writes: columns of B of each expert one after the other, as it did before September 2026.
PACKING, BY_EXPERT = "lora_B_layout", "grouped_by_expert"


class BaseModel(NamedTuple):
    """The model that an adapter belongs to, read from its config.json."""

    model_type: str
    hidden_size: int
    family: Family

    @classmethod
    def read(cls, folder: str | Path) -> "BaseModel":
        """Read the config of a model from its folder, or from the file itself."""
        path = Path(folder)
        path = path / "config.json" if path.is_dir() else path
        config = _as_object(_read_json(path))
        family, text = family_of(config), getattr(config, "text_config", None) or config
        return cls(text.model_type, text.hidden_size, family)

    @property
    def expert_names(self) -> ExpertNames:
        """Names and orders of the matrices of the experts."""
        block = [entry for entry in self.family.block.entries if entry.is_of_experts]
        gate = next((entry for entry in block if len(entry.names) == 2), None)
        order = "interleaved" if gate is not None and gate.interleaved else "concatenated"
        return ExpertNames(
            model=self.model_type,
            gate=None if gate is None else order,  # type: ignore[arg-type]
            is_transposed=block[0].transposed,
            published=self.family.published_experts,
            vllm_refuses_stacks=self.model_type.startswith("gemma4"),
        )

    def published(self, module: str) -> str:
        """Return the name that published checkpoints have for a module in a block of transformers."""
        return _renamed(module, self.family.block.module, self.family.published_block)

    def in_memory(self, module: str) -> str:
        """Return the name in transformers for a published name."""
        return _renamed(module, self.family.published_block, self.family.block.module)


def _renamed(module: str, block: str, other: str) -> str:
    """Rename the block of a decoder layer in the path of a module; without a name, its parts are in the layer."""
    if block == other:
        return module
    if not block:
        return re.sub(r"(\.\d+)\.$", rf"\g<1>.{other}.", module)
    return re.sub(rf"(\.\d+)\.{block}(?=\.|$)", r"\g<1>" + (f".{other}" if other else ""), module)


class ExpertsInFile(NamedTuple):
    """The tensors of the experts of a block."""

    kind: str  # "packed", "per_expert" or "stacked"
    modules: Mapping[str, str]  # path of the module in the file by the part of its name after the block


class AdapterFile:
    """An adapter, opened.

    Args:
        path: folder with `adapter_model.safetensors` and `adapter_config.json`, or the former.
        model: the model it belongs to, by default the model in the folder `base_model_name_or_path` of the config.
        config: by default `adapter_config.json` beside the file.
    """

    def __init__(
        self, path: str | Path, model: BaseModel | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        path = Path(path)
        self.path = path / "adapter_model.safetensors" if path.is_dir() else path
        if not stat.S_ISREG(self.path.stat().st_mode):  # opening a FIFO waits for a writer
            raise ValueError(f"{self.path} must be a safetensors file")
        self.config = _read_config(self.path.parent / "adapter_config.json") if config is None else config
        try:
            self._file: Any = safe_open(self.path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{self.path} must be in safetensors format: {error}") from error
        base = self.config.get("base_model_name_or_path")
        is_here = bool(base) and Path(str(base), "config.json").exists()
        self.model = BaseModel.read(str(base)) if model is None and is_here else model
        self.names: list[str] = sorted(self._file.keys())  # type: ignore[no-untyped-call]
        self.experts: dict[str, ExpertsInFile] = {}
        self.others: dict[str, tuple[str, str]] = {}  # both tensors of each other module
        self.unknown: list[str] = []  # tensors that are not factors
        self._sort_modules()

    def _sort_modules(self) -> None:
        modules: dict[str, dict[str, str]] = {}
        for name in self.names:
            match = _FACTOR.fullmatch(name)
            if match is None:
                self.unknown.append(name)
            else:
                modules.setdefault(match["module"], {})["B" if "B" in match["factor"] else "A"] = name
        found: dict[str, tuple[set[str], dict[str, str]]] = {}
        for module, pair in modules.items():
            if len(pair) < 2:
                (name,) = pair.values()
                raise ValueError(f"{self.path}: {name} must have its other factor beside it, got none")
            match = _EXPERTS.fullmatch(module)
            if match is None or (match["block"] and not match["block"].endswith(".")):
                self.others[module] = pair["A"], pair["B"]
                continue
            kind = "packed" if match["name"] is None else "per_expert" if _EXPERT.fullmatch(match["key"]) else "stacked"
            kinds, paths = found.setdefault(match["block"], (set(), {}))
            kinds.add(kind)
            paths[match["key"]] = module
        for block, (kinds, paths) in found.items():
            if len(kinds) > 1:
                raise ValueError(f"{self.path}: the experts of {block} must have one layout, got {sorted(kinds)}")
            self.experts[block] = ExpertsInFile(kinds.pop(), paths)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the name that safetensors has for the dtype of a tensor."""
        dtype: str = self._file.get_slice(name).get_dtype()
        return dtype

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank and the scale that the config gives a module, or a parameter of experts."""
        name = module.removeprefix(PREFIX)
        rank = _of_pattern(self.config.get("rank_pattern"), name, self.config["r"])
        alpha = _of_pattern(self.config.get("alpha_pattern"), name, self.config["lora_alpha"])
        return rank, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    @cached_property
    def layout(self) -> AdapterLayout | None:
        """Layout of the experts; None without experts."""
        kinds = {each.kind for each in self.experts.values()}
        if len(kinds) > 1:
            raise ValueError(f"{self.path}: all experts must have one layout, got {sorted(kinds)}")
        match kinds.pop() if kinds else None:
            case "per_expert":
                return "per_expert"
            case "stacked":
                is_w123 = any("experts.w1" in each.modules for each in self.experts.values())
                return "shared_outer" if is_w123 else "sglang_stacked"
            case "packed":
                if not self.config.get("target_parameters"):
                    return "vllm_stacked"
                return "peft_0.18" if any(self._packed(block)[1] for block in self.experts) else "peft"
        return None

    def parameters(self, block: str) -> dict[str, str]:
        """Return the module of each projection of a block in the file, or of each expert's."""
        if self.experts[block].kind == "packed":
            return self._packed(block)[0]
        found = {}
        for key, module in self.experts[block].modules.items():
            match = _EXPERT.fullmatch(key)
            name = key.rpartition(".")[2] if match is None else match["name"]
            projection = self._projections.get(name)
            if projection is None:
                raise ValueError(
                    f"{self.path}: {module} must be one of the projections {listed([*self._projections])}, got {name!r}"
                )
            found[projection if match is None else f"{match['expert']}.{projection}"] = module
        return found

    @cached_property
    def _projections(self) -> dict[str, str]:
        published = (self.model and self.model.expert_names.published) or {}
        return _PROJECTIONS | {key.rpartition(".")[2]: name for name, key in published.items()}

    def _packed(self, block: str) -> tuple[dict[str, str], bool]:
        """Return the modules of packed parameters, innermost first, and whether A has the outputs.

        The shapes tell both, except for one parameter or experts without a gate: there, the hidden size.
        """
        modules = [module for _, module in sorted(self.experts[block].modules.items(), reverse=True)]
        sizes = [(self.shape(self._names(each)[0])[1], self.shape(self._names(each)[1])[0]) for each in modules]
        targets = {name.rpartition(".")[2] for name in self.config.get("target_parameters") or ()}
        targets &= {"gate_up_proj", *W123}
        hidden = self.model.hidden_size if self.model else None
        if len(modules) == 2 and "up_proj" not in targets:
            for (first, second), named in (
                (sizes, ("gate_up_proj", "down_proj")),
                (sizes[::-1], ("down_proj", "gate_up_proj")),
            ):
                for up, down, is_swapped in ((first, second, False), (first[::-1], second[::-1], True)):
                    if up[0] == down[1] and up[1] == 2 * down[0]:
                        return dict(zip(named, modules, strict=True)), is_swapped
        ordered = [name for name in ("gate_up_proj", *W123) if name in targets]
        if len(ordered) != len(modules):
            raise ValueError(
                f"{self.path}: {block}experts has {len(modules)} parameters with sizes {sizes}, which must be the ones "
                f"of target_parameters, got {ordered}"
            )
        outside = sizes[0] if ordered[0] != "down_proj" else sizes[0][::-1]
        return dict(zip(ordered, modules, strict=True)), hidden is not None and outside[0] != hidden == outside[1]

    def _names(self, module: str) -> tuple[str, str]:
        return f"{module}.lora_A.weight", f"{module}.lora_B.weight"

    def read_experts(self, block: str) -> dict[str, tuple[Factors, float]]:
        """Read the factors of the experts of a block, with their scales, by projection."""
        kind, found = self.experts[block].kind, self.parameters(block)
        if kind == "per_expert":
            return self._read_each_expert(block, found)
        is_swapped = kind == "packed" and self._packed(block)[1]
        result = {}
        for projection, module in found.items():
            rank, scale = self.rank_and_scale(f"{block}experts.{projection}" if kind == "packed" else module)
            if kind == "packed":
                by_expert = self.config.get(PACKING) == BY_EXPERT
                factors = unpacked(self.packed(module, rank), rank, b_by_expert=by_expert)
                factors = factors.swapped() if is_swapped else factors
            else:
                factors = Factors(*map(self.tensor, self._names(module)))
            if factors.a.dim() != 3 or factors.b.dim() != 3:
                shapes = [tuple(each.shape) for each in factors]
                raise ValueError(f"{self.path}: {module} must have factors of three dims, got {shapes}")
            self._check_pair(module, rank, factors)
            result[projection] = factors, scale
        return result

    def _read_each_expert(self, block: str, found: Mapping[str, str]) -> dict[str, tuple[Factors, float]]:
        count = 1 + max(int(key.partition(".")[0]) for key in found)
        result = {}
        for projection in sorted({key.partition(".")[2] for key in found}):
            modules = []
            for expert in range(count):
                if f"{expert}.{projection}" not in found:
                    raise ValueError(f"{self.path}: {block}experts must have {projection} of expert {expert}, got none")
                modules.append(found[f"{expert}.{projection}"])
            scales = {self.rank_and_scale(module)[1] for module in modules}
            if len(scales) > 1:
                raise ValueError(
                    f"{self.path}: the experts of {block} must have one scale for {projection}, got {sorted(scales)}"
                )
            a, b = zip(*(map(self.tensor, self._names(module)) for module in modules), strict=True)
            factors = Factors(torch.stack(a), torch.stack(b))
            self._check_pair(modules[0], self.rank_and_scale(modules[0])[0], factors)
            result[projection] = factors, scales.pop()
        return result

    def read_other(self, module: str) -> tuple[Factors, float]:
        """Read the factors of another module as stacks of one matrix, with their scale."""
        a, b = map(self.tensor, self.others[module])
        if a.dim() != 2 or b.dim() != 2:
            raise ValueError(
                f"{self.path}: {module} must have factors (r, in) and (out, r), got {tuple(a.shape)}, {tuple(b.shape)}"
            )
        factors, (rank, scale) = Factors(a[None], b[None]), self.rank_and_scale(module)
        self._check_pair(module, rank, factors)
        return factors, scale

    def packed(self, module: str, rank: int) -> Factors:
        """Read two tensors with all experts, of the given rank each."""
        a, b = map(self.tensor, self._names(module))
        if a.shape[0] != b.shape[1] or a.shape[0] % rank:
            raise ValueError(
                f"{self.path}: {module} must have a rank that divides the {a.shape[0]} rows of A and the {b.shape[1]} "
                f"columns of B into experts, got r={rank} in adapter_config.json"
            )
        return Factors(a, b)

    def _check_pair(self, module: str, rank: int, factors: Factors) -> None:
        a, b = (tuple(each.shape) for each in factors)
        if (a[1], b[2]) != (rank, rank) or (a[0] != b[0] and 1 not in (a[0], b[0])):
            raise ValueError(
                f"{self.path}: {module} must have factors (E, r, in) and (E, out, r) with r={rank} of "
                f"adapter_config.json, got {a} and {b}"
            )

    def scales(self) -> Iterator[float]:
        """Yield the scale of each pair of tensors."""
        for block, experts in self.experts.items():
            for name, module in self.parameters(block).items():
                yield self.rank_and_scale(f"{block}experts.{name}" if experts.kind == "packed" else module)[1]
        for module in self.others:
            yield self.rank_and_scale(module)[1]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be a JSON file: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must have an object of JSON, got {type(fields).__name__}")
    return fields


def _read_config(path: Path) -> dict[str, Any]:
    config = _read_json(path)
    missing = [key for key in ("peft_type", "r", "lora_alpha") if key not in config]
    if missing:
        raise ValueError(f"{path} must have the fields of a LoRA config, got no {listed(missing)}")
    return config


def _as_object(value: Any) -> Any:
    """Return a config of JSON with attributes, as the config of a transformers model has."""
    return (
        SimpleNamespace(**{key: _as_object(each) for key, each in value.items()}) if isinstance(value, dict) else value
    )


def _of_pattern(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a name, as PEFT does."""
    found = (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name))
    return next(found, default)
