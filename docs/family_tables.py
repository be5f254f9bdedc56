"""docs/families.md: the experts of all model families in the installed transformers, what computes and replaces them.

python docs/family_tables.py > docs/families.md
"""

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig

from maxmoe.families.family import families
from maxmoe.integrations.transformers.gates import fused_gate

# What `replace_moe_blocks` lacks for the families without a preset. With "a preset" alone, a `MoE` computes the block.
_MISSING = {
    "a preset; the block is the one of DeepSeek-V3": "bailing_hybrid dots3_note glm4v_moe kimi_linear mimo_v2_flash",
    "a preset; the block is the one of DeepSeek-V2": "deepseek_ocr2 unlimited_ocr",
    "a preset; the block is the one of Qwen3-MoE or Qwen3-Next": "qwen3_omni_moe qwen3_vl_moe qwen4_exp",
    "a preset; softmax of the selected logits": "aria granitemoe_swa",
    "a preset; other names and places of the router or of the shared expert": "afmoe flint hunyuan_v1_moe hy_v3 jamba "
    "lara_mini minimax_m3_vl openai_privacy_filter",
    "a preset; the block is the one of DeepSeek-V3 with a clipped activation": "glm5_next hy_v4 hy_v4_vl",
    "a preset; a block without shared experts, and a soft-capped SwiGLU": "inkling2 inkling2_loop",
    "a preset; the block is the one of Mistral Large 4": "mistral4",
    "a preset; the block is the one of Gemma 4": "diffusion_gemma",
    "a module: the parts lie in the decoder layer, from which `MoE.from_transformers` takes them": "gemma4",
    "experts and a router for each modality, chosen by the types of the tokens": "ernie4_5_vl_moe",
    "SparseMixer, a router with a gradient of its own": "phimoe",
    "a block in transformers that uses the experts which its router selects": "nllb_moe",
    "a router: its experts belong to data sets, or are rows of a table": "vitpose_backbone doge",
}

# Sizes of small experts, by a part of the name of the config field.
_SIZES = {"experts": 5, "hidden_size": 7, "intermediate": 3}


@cache
def _sources() -> dict[str, str]:
    """Return the source of every model by its folder, without importing the models."""
    folders = (Path(transformers.__file__).parent / "models").iterdir()
    files = {folder.name: folder / f"modeling_{folder.name}.py" for folder in sorted(folders)}
    return {name: file.read_text() for name, file in files.items() if file.exists()}


@cache
def models() -> tuple[str, ...]:
    """List the folders of the models that support experts implementations."""
    # transformers itself looks for the decorator in the source.
    return tuple(name for name, source in _sources().items() if "@use_experts_implementation" in source)


@cache
def sparse_models() -> tuple[str, ...]:
    """List the folders of the models with experts: a module with experts, or with such a name."""
    experts = re.compile(r"self\.\w*experts\w* = \w+\(|^class \w*(MoE|Experts)\w*\(nn\.Module", re.MULTILINE)
    return tuple(name for name, source in _sources().items() if experts.search(source))


def replaced_as(model: str) -> list[str]:
    """Return the model types of a folder whose blocks `replace_moe_blocks` replaces."""
    module = import_module(f"transformers.models.{model}.configuration_{model}")
    configs = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    names = {config.model_type for config in configs if getattr(config, "model_type", None) in families()}
    return sorted(name for name in names if not families()[name].lies_in_layer)


def missing(model: str) -> Iterator[str]:
    """List what `replace_moe_blocks` lacks for a model."""
    return (text for text, folders in _MISSING.items() if model in folders.split())


def experts_classes(model: str) -> list[type[nn.Module]]:
    """Import a model of `models` and return its classes of experts."""
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    # The decorator adds `_apply_gate` to every class.
    return [value for value in own if isinstance(value, type) and "_apply_gate" in vars(value)]


def small_experts(experts_class: type[nn.Module]) -> Any:
    """Build experts with the defaults of their family, E = 5, D = 7, F = 3 and uninitialized parameters."""
    module = import_module(experts_class.__module__)
    for config_class in vars(module).values():
        if isinstance(config_class, type) and issubclass(config_class, PreTrainedConfig):
            try:
                return experts_class(_SmallConfig(config_class()))
            except AttributeError:
                continue  # the config of another part of the model
    raise LookupError(f"no configuration in {module.__name__} has the fields that {experts_class.__name__} reads")


class _SmallConfig:
    """Config with other sizes for the experts, replaced at access; other fields need not fit them."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return next((size for part, size in _SIZES.items() if part in name), value)


def table() -> str:
    """Return a Markdown table with the layout, the activation and the operator of the experts of every family."""
    lines = ["| model | experts | parameters | activation | operator |", "|---|---|---|---|---|"]
    for model in models():
        for experts_class in experts_classes(model):
            experts = small_experts(experts_class)
            cells = (f"`{experts_class.__name__}`", _parameters(experts), *_activation_and_operator(experts))
            lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _parameters(experts: Any) -> str:
    parts = ["`gate_up_proj`" if experts.has_gate else "`up_proj`"]
    if experts.has_gate:
        parts.append("concatenated" if experts.is_concatenated else "interleaved")
    parts += ["transposed"] * experts.is_transposed + ["bias"] * experts.has_bias
    return ", ".join(parts)


def _activation_and_operator(experts: Any) -> tuple[str, str]:
    gate = fused_gate(experts)
    if gate is None:
        return "a gate of its own", "`gmm`"
    if experts.has_post_expert_norm:
        return f"{gate['activation']}, norm after each expert", "`gmm`"
    return f"{gate['activation']}{_constants(gate)}", "`expert_ffn`"


def _constants(gate: dict[str, Any]) -> str:
    if "gate_softcap" in gate:
        return f", softcaps {gate['gate_softcap']:g} and {gate['up_softcap']:g}"
    return "" if gate["limit"] is None else f", clipped at {gate['limit']:g}"


def replacement_table() -> str:
    """Return a Markdown table of all models with experts, by what is missing for their replacement."""
    replaced = [model for model in sparse_models() if replaced_as(model)]
    rows = [("yes", replaced)]
    rows += [(text, [model for model in sparse_models() if text in missing(model)]) for text in _MISSING]
    lines = ["| `replace_moe_blocks`: yes, or what is missing | models |", "|---|---|"]
    return "\n".join(lines + [f"| {text} | {', '.join(models)} |" for text, models in rows if models])


def preset_table() -> str:
    """Return a Markdown table of the presets: the flagship, and the model types that `from_transformers` takes."""
    lines = ["| `maxmoe.presets` | flagship | `model_type` of transformers |", "|---|---|---|"]
    for preset in sorted({family.preset for family in families().values()}, key=lambda preset: preset.__name__):
        flagship = (preset.__doc__ or "").partition(":")[0]
        model_types = (model_type for model_type, family in families().items() if family.preset is preset)
        lines.append(f"| `{preset.__name__}` | {flagship} | {', '.join(model_types)} |")
    return "\n".join(lines)


def document() -> str:
    """Return the text of docs/families.md."""
    return f"""# Families of models in transformers

After `import maxmoe.integrations.transformers` these models take `experts_implementation="maxmoe"`. The table is made
from transformers {transformers.__version__} with the defaults of each family, by
`python docs/family_tables.py`; the tests compare every row with the family's own code.

Llama 4 (`Llama4TextExperts`, transposed, silu) has no experts implementations in transformers; maxmoe patches its
block. It runs on `expert_ffn` and computes the routed tokens only, whereas the original code computes every expert on
every token. Step-3.7 (`Step3p7Experts`, concatenated, silu, whose output is clipped at a limit for each layer) has none
either; with maxmoe it takes "maxmoe" and runs on `expert_ffn`, and has its own code under every other name. Families
that are only in the second table ignore the setting, as they ignore every experts implementation.

{table()}

## Blocks that are replaced

[`replace_moe_blocks`](how_to/transformers.md#replace-the-blocks-of-a-model-of-transformers) needs a preset of the
family, and a layer that computes what the block computes. This table has every model of transformers with experts.

{replacement_table()}

## Presets

The [configs of their layers](api/maxmoe.presets.rst), with the numbers of the flagship of each family.

{preset_table()}
"""


if __name__ == "__main__":
    print(document(), end="")
