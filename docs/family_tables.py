"""docs/families.md: the experts of all model families in the installed transformers, and what computes them.

python docs/family_tables.py > docs/families.md
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig

from maxmoe.integrations.transformers.gates import fused_gate

# Sizes of small experts, by a part of the name of the config field.
_SIZES = {"experts": 5, "hidden_size": 7, "intermediate": 3}


@cache
def models() -> tuple[str, ...]:
    """List the folders of the models that support experts implementations, without importing the models."""
    # transformers itself looks for the decorator in the source.
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    return tuple(sorted(path.parent.name for path in files if "@use_experts_implementation" in path.read_text()))


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


def document() -> str:
    """Return the text of docs/families.md."""
    return f"""# Families of models in transformers

After `import maxmoe.integrations.transformers` these models take `experts_implementation="maxmoe"`. The table is made
from transformers {transformers.__version__} with the defaults of each family, by
`python docs/family_tables.py`; the tests compare every row with the family's own code.

Llama 4 (`Llama4TextExperts`, transposed, silu) has no experts implementations in transformers; maxmoe patches its
block. It runs on `expert_ffn` and computes the routed tokens only, whereas the original code computes every expert on
every token. Step-3.7 (`Step3p7Experts`, concatenated, silu, whose output is clipped at a limit for each layer) has none
either; with maxmoe it takes "maxmoe" and runs on `expert_ffn`, and has its own code under every other name. All other
families ignore the setting, as any experts implementation.

{table()}
"""


if __name__ == "__main__":
    print(document(), end="")
