"""The command `adapters`: what the files of an adapter are, and their conversion for other programs."""

import argparse
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from maxmoe.adapters.layouts import collapsed, is_shared
from maxmoe.convert.adapter_conversion import TARGETS, convert_adapter
from maxmoe.convert.adapter_file import AdapterFile, BaseModel
from maxmoe.convert.adapter_packing import packing_of
from maxmoe.text_table import listed, readable_bytes, report, with_bar

LAYOUTS = {
    "peft": "parameters of all experts in one tensor, A (E r, in) and B (out, r E), as PEFT saves them since 0.19.1",
    "peft_0.18": "parameters of all experts in one tensor; A has the output, B the input, as PEFT saved up to 0.19.0",
    "vllm_stacked": "parameters of all experts in one tensor, A (E r, in) and B (out, r E), as vLLM reads them",
    "per_expert": "matrices of single experts, A (r, in) and B (out, r), as vLLM, SGLang and llama.cpp read them",
    "sglang_stacked": "stacks of all experts, A (E, r, in) and B (E, out, r), as SGLang reads them",
    "shared_outer": "stacks w1, w2, w3 of all experts, A (E, r, in) and B (E, out, r), as vLLM and SGLang read them",
    None: "no adapters of experts",
}


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = command.add_argument
    add("file", help="folder with adapter_model.safetensors and adapter_config.json")
    add("--model", help="folder of the base model, or its config.json: names, and the order of gate and up")
    add("--to", choices=list(TARGETS), help="program and layout to write the adapter for")
    add("--out", help="folder for the written adapter")


def adapters(options: argparse.Namespace) -> str:
    """Return the report on an adapter, or on its conversion."""
    if (options.to is None) != (options.out is None):
        raise ValueError(f"to and out must be given together, got to={options.to} and out={options.out}")
    file = AdapterFile(options.file, BaseModel.read(options.model) if options.model else None)
    packing = packing_of(file)
    if options.to is None:
        return report([*_description(file), _packing(file, packing), _products(file)])
    packing.check(str(file.path))
    result = convert_adapter(file, options.to, options.out, progress=_with_bar)
    rounded = (
        f"B was multiplied by a quotient of scales and rounded in {listed(result.rounded)}."
        if result.rounded
        else "No number was rounded."
    )
    shared = "The experts share the factors of the hidden size. " if result.is_shared else ""
    return report(
        [
            *_description(file),
            f"Written: {result.file}, for {options.to}. Rank {result.rank}, scale {result.scale:g}. {shared}{rounded}",
            f"Compared in float64: {result.num_matrices} products of factors, read again from the new file. The "
            f"largest difference is {result.difference:.3g} of the largest number of its product.",
        ]
    )


def _description(file: AdapterFile) -> list[str]:
    """Return paragraphs on the tensors, the layout and the model of an adapter."""
    config, sizes = file.config, Counter(file.dtype(name) for name in file.names)
    dtypes = ", ".join(f"{count} of {dtype}" for dtype, count in sizes.items())
    kept = {key: config[key] for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern") if config.get(key)}
    ranks = ", ".join(
        f"{key} {value}" for key, value in (kept | {"use_rslora": bool(config.get("use_rslora"))}).items()
    )
    model = config.get("base_model_name_or_path")
    read = f"{file.model.model_type}, hidden size {file.model.hidden_size}" if file.model else "config.json not given"
    lines = [
        f"{file.path}: {len(file.names)} tensors, {dtypes}, {readable_bytes(file.path.stat().st_size)}.",
        f"Base model: {model} ({read}). {ranks}.",
        f"Layout: {LAYOUTS[file.layout]}.",
    ]
    if file.unknown:
        lines.append(f"No factors, which servers would not read: {listed(file.unknown)}.")
    return ["\n".join(lines)]


def _packing(file: AdapterFile, packing: Any) -> str:
    """Return a sentence on the order of the columns of B."""
    if not any(experts.kind == "packed" for experts in file.experts.values()):
        return ""
    order = "the columns of an expert follow each other" if packing.is_by_expert else "the expert is the fastest index"
    reason = f"lora_B_layout {packing.marker!r} of the config" if packing.marker else "as PEFT packs"
    return (
        f"Columns of B: {order} ({reason}). Norms of the columns fit their experts {packing.expert_fastest:.1f} "
        "standard deviations better than chance with the expert as fastest index, "
        f"{packing.by_expert:.1f} if the columns of an expert follow each other."
    )


@torch.no_grad()
def _products(file: AdapterFile) -> list[list[str]]:
    """Return a table of the products of the factors, of which each is computed in float64."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for part in _with_bar([*file.experts, *file.others], "multiplying"):
        read = file.read_experts(part) if part in file.experts else {part.rpartition(".")[2]: file.read_other(part)}
        for name, (factors, scale) in read.items():
            shared = "yes" if part in file.experts and is_shared(name, collapsed(name, factors)) else "no"
            a, b = factors.expanded()
            key = (
                f"experts.{name}" if part in file.experts else name,
                str(factors.num_experts),
                f"[{b.shape[1]}, {a.shape[2]}]",
                str(a.shape[1]),
                f"{scale:g}",
                shared if part in file.experts else "",
            )
            norms = [float((scale * b[each].double() @ a[each].double()).norm()) for each in range(len(a))]
            rows.setdefault(key, []).extend(norms)
    head = ["projection", "experts", "matrix", "rank", "scale", "shared outer factor", "matrices", "zero", "norms"]
    return [head] + [
        [*key, str(len(norms)), str(norms.count(0.0)), f"{min(norms):.3g} to {max(norms):.3g}"]
        for key, norms in rows.items()
    ]


def _with_bar(parts: Iterable[Any], work: str) -> Iterable[Any]:
    return with_bar(parts, desc=work, unit=" modules", delay=2)
