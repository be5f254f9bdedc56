"""Conversion of adapters between the files of PEFT, vLLM, SGLang and llama.cpp, and the proof that they are equal.

A file is read and written tensor by tensor. Factors of a lower rank get rows and columns of zeros, another scale is
multiplied into B. The new file takes its place only after every product of its factors has been compared.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from maxmoe.adapters.layouts import (
    WITH_SHARED,
    AdapterLayout,
    ExpertNames,
    Factors,
    apart,
    arranged,
    check_shared,
    collapsed,
    filled,
    is_shared,
    padded,
    tensors_of,
    trimmed,
)
from maxmoe.adapters.served import check_config, common_scale, served_config
from maxmoe.convert.adapter_file import PACKING, PREFIX, AdapterFile, BaseModel
from maxmoe.convert.safetensors_header import write_header
from maxmoe.files import replacing
from maxmoe.text_table import listed

Progress: TypeAlias = Callable[[Iterable[Any], str], Iterable[Any]]

TARGETS: dict[str, AdapterLayout] = {
    "peft": "peft",
    "peft-0.18": "peft_0.18",
    "vllm": "per_expert",
    "vllm-stacked": "vllm_stacked",
    "vllm-shared": "shared_outer",
    "sglang": "sglang_stacked",
    "llama.cpp": "per_expert",
}
_OF_PEFT = ("peft", "peft_0.18")


class Conversion(NamedTuple):
    """The result of a conversion.

    Attributes:
        file: path of the new file.
        rank: rank of all factors.
        scale: scale of all products.
        is_shared: whether the experts share the factors of the hidden size.
        rounded: modules whose B was rounded when another scale was multiplied into it.
        num_matrices: number of products of factors that were compared.
        difference: largest difference of a product in float64, relative to the largest number of the product.
    """

    file: Path
    rank: int
    scale: float
    is_shared: bool
    rounded: list[str]
    num_matrices: int
    difference: float


@torch.no_grad()
def convert_adapter(source: AdapterFile, target: str, folder: str | Path, *, progress: Progress) -> Conversion:
    """Write an adapter for another program.

    Args:
        source: adapter, with its model.
        target: name of the program and its layout, one of `TARGETS`.
        folder: folder for ``adapter_model.safetensors`` and ``adapter_config.json``.
        progress: function that wraps an iterable, with the name of the work.

    Raises:
        ValueError: for an adapter whose model is not known, for a layout that the family does not have, for tensors
            that the program would drop without an error, and if a product of factors has changed. Nothing has been
            written then.
    """
    layout = TARGETS[target]
    if source.model is None:
        raise ValueError(
            f"model must be the config.json of the base model of {source.path}, for the names and the order of gate "
            f"and up, got none; its name is {source.config.get('base_model_name_or_path')!r}"
        )
    source.model.expert_names.check(layout)
    _check_nothing_is_dropped(source, target)
    writer = _Writer(source, source.model, layout, progress)
    folder = Path(folder)
    if (folder / "adapter_model.safetensors").resolve() == source.path.resolve():
        raise ValueError(f"out must be another folder than the one of the adapter, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    config = writer.config()
    with replacing(folder / "adapter_model.safetensors") as new:
        with new.open("wb") as file:
            begins = write_header(file, writer.like)
            for name, tensor in writer.tensors():
                file.seek(begins[name])
                file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        written = AdapterFile(new, source.model, config)
        count, difference = _compare(source, written, writer, progress)
    with replacing(folder / "adapter_config.json") as new:
        new.write_text(json.dumps(config, indent=2, sort_keys=True))
    return Conversion(
        folder / "adapter_model.safetensors",
        writer.rank,
        writer.scale,
        writer.is_shared,
        sorted(writer.rounded),
        count,
        difference,
    )


def _check_nothing_is_dropped(source: AdapterFile, target: str) -> None:
    """Raise for tensors and fields of the config that a program would leave out, or read as something else."""
    if source.unknown:
        raise ValueError(
            f"{target} does not read {listed(source.unknown)} of {source.path}: train the adapter without, or merge it"
        )
    check_config(source.config)
    if target == "sglang":
        for module, names in source.others.items():
            if not re.search(r"\.layers\.\d+\.", module) and not re.search("embed_tokens|lm_head", module):
                raise ValueError(f"{target} leaves out {names[0]}, which is in no layer: merge it")


class _Writer:
    """The tensors of the new file. A first pass over the old one finds ranks and shapes, a second one writes."""

    def __init__(self, source: AdapterFile, model: BaseModel, layout: AdapterLayout, progress: Progress) -> None:
        self.source, self.model, self.layout, self._progress = source, model, layout, progress
        self.names = model.expert_names
        self.parts = [*source.experts, *source.others]
        # Between the orientations of PEFT, ranks and scales stay what the config says.
        self.keeps_config = source.layout in _OF_PEFT and layout in _OF_PEFT
        self.rounded: set[str] = set()
        self.scale = common_scale(source.scales())
        self.rank, self.is_shared = 1, layout in WITH_SHARED and bool(source.experts)
        found: dict[str, dict[str, Factors]] = {}
        for part in progress(self.parts, "reading"):
            experts = self._factors(part)
            self.rank = max([self.rank, *(factors.a.shape[1] for factors in experts.values())])
            self.is_shared &= part in source.others or all(is_shared(*each) for each in experts.items())
            found[part] = {name: factors.map(lambda each: each.to("meta")) for name, factors in experts.items()}
        check_shared(layout, self.is_shared, str(source.path))
        self.parameters = [f"{part}experts.{name}" for part in source.experts for name in found[part]]
        like = {name: tensor for part, experts in found.items() for name, tensor in self._named(part, experts)}
        self.like = dict(sorted(like.items(), key=lambda each: -each[1].dtype.itemsize))  # the largest first: aligned

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors by name."""
        for part in self._progress(self.parts, "writing"):
            yield from self._named(part, self._factors(part))

    def config(self) -> dict[str, Any]:
        """Return the config of the new file."""
        if self.keeps_config:
            return {key: value for key, value in self.source.config.items() if key != PACKING}
        projections = self.names.projections if self.source.experts else ()
        modules = [self.renamed(module) for module in self.source.others]
        config = served_config(self.source.config, self.rank, self.scale, {*modules}, {*projections})
        if self.layout in _OF_PEFT:
            config["target_modules"] = sorted(module.removeprefix(PREFIX) for module in modules)
            config["target_parameters"] = sorted(self.renamed(name).removeprefix(PREFIX) for name in self.parameters)
        return config

    def renamed(self, module: str) -> str:
        """Return the name of a module in the new file."""
        of_peft = self.source.layout in _OF_PEFT, self.layout in _OF_PEFT
        if of_peft[0] == of_peft[1] or not self.source.experts:
            return module
        return self.model.in_memory(module) if of_peft[1] else self.model.published(module)

    def _factors(self, part: str) -> dict[str, Factors]:
        """Return the factors of a block or of another module as the layout has them, without rows that add nothing."""
        if part in self.source.others:
            factors, scale = self.source.read_other(part)
            return {"": factors if self.keeps_config else trimmed(self._folded(part, factors, scale))}
        read = self.source.read_experts(part)
        if self.keeps_config:
            return {name: factors for name, (factors, _) in read.items()}
        experts = {name: trimmed(self._folded(f"{part}experts.{name}", *each)) for name, each in read.items()}
        experts = arranged(self.layout, filled(experts, self.names), self.names)
        if self.layout in _OF_PEFT:
            return {name: factors for name, factors in experts.items() if factors.a.any() or factors.b.any()}
        return {name: collapsed(name, factors) for name, factors in experts.items()}

    def _folded(self, module: str, factors: Factors, scale: float) -> Factors:
        """Multiply the quotient of the scales into B."""
        if scale == self.scale:
            return factors
        exact = factors.b.double() * (scale / self.scale)
        b = exact.to(factors.b.dtype)
        if not b.double().equal(exact):
            self.rounded.add(module)
        return factors._replace(b=b)

    def _named(self, part: str, experts: Mapping[str, Factors]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a block or of another module by name."""
        if not self.keeps_config:
            experts = {name: padded(factors, self.rank) for name, factors in experts.items()}
        if part in self.source.experts:
            if not self.is_shared:
                experts = {name: factors.expanded() for name, factors in experts.items()}
            yield from tensors_of(self.layout, self.renamed(part), experts, self.names)
        else:
            for name, factor in zip(self.source.others[part], experts[""], strict=True):
                yield f"{self.renamed(part)}{name.removeprefix(part)}", factor[0]


def _compare(source: AdapterFile, written: AdapterFile, writer: _Writer, progress: Progress) -> tuple[int, float]:
    """Compare every product of factors in float64; return their number and the largest relative difference."""
    count, largest = 0, 0.0
    for part in progress(writer.parts, "comparing"):
        new = writer.renamed(part)
        pairs = (source, part), (written, new)
        old, got = (_products_of(file, name, writer.names) for file, name in pairs)
        for name in old | got:
            for expert in range(max(each[name][0].num_experts for each in (old, got) if name in each)):
                one, other = (_product(each.get(name), expert) for each in (old, got))
                both = [each for each in (one, other) if each is not None]
                size, difference = both[0].abs().max(), (both[0] - (both[1] if len(both) > 1 else 0)).abs().max()
                if not difference.isfinite() or difference > _TOLERANCE[bool(writer.rounded)] * size:
                    raise ValueError(
                        f"the product of the factors of {part}{name}, matrix {expert}, must stay the same, got a "
                        f"difference of {float(difference):.3g} for numbers up to {float(size):.3g}"
                    )
                count, largest = count + 1, max(largest, float(difference / size) if size else 0.0)
    return count, largest


# Sums in float64 in another order, for another rank; beside it a B in bfloat16 whose numbers were rounded once.
_TOLERANCE = {False: 1e-12, True: 2.0**-7}


def _products_of(file: AdapterFile, part: str, names: ExpertNames) -> dict[str, tuple[Factors, float]]:
    if part in file.others:
        return {"": file.read_other(part)}
    read = file.read_experts(part)
    separate = apart({name: factors for name, (factors, _) in read.items()}, names)
    fused = read.get("gate_up_proj")
    return {name: (factors, read.get(name, fused)[1]) for name, factors in separate.items()}  # type: ignore[index]


def _product(pair: tuple[Factors, float] | None, expert: int) -> Tensor | None:
    if pair is None:
        return None
    (a, b), scale = pair[0].expanded(), pair[1]
    return scale * b[expert].double() @ a[expert].double()
