"""The tables of docs/layer.md: the fields of `maxmoe.MoEConfig` and the components, from their docstrings.

python docs/config_table.py
"""

import dataclasses
import inspect
import re
from typing import get_args

import maxmoe
from maxmoe import ExpertNorms, MoEConfig, ZeroComputation
from maxmoe.config.components import ActivationRule, Component, RouterRule, kinds

OWN_FIELDS = {ExpertNorms: "expert_norms", ZeroComputation: "zero_computation"}


def meanings() -> dict[str, str]:
    """The descriptions of the section Args of the docstring, each in one line."""
    (section,) = re.findall(r"^Args:\n(.*?)^$", inspect.getdoc(MoEConfig) or "", re.MULTILINE | re.DOTALL)
    return {
        name: " ".join(text.split())
        for name, text in re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section, re.M | re.S)
    }


def values(field: dataclasses.Field[object]) -> str:
    """The default, and the other values of a field that has a few."""
    if field.default is dataclasses.MISSING:
        return "Required."
    literals = [each for kind in (field.type, *get_args(field.type)) for each in get_args(kind)]
    options = [option for option in dict.fromkeys(literals) if isinstance(option, str)]
    others = ", ".join(code(option) for option in options if option != field.default)
    return f"Default: {code(field.default)}" + (f"; others: {others}." if others else ".")


def code(value: object) -> str:
    """A value as Python writes it, with the quotes of the docs."""
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def config_table() -> str:
    """A row for each field."""
    described = meanings()
    rows = ["| field | meaning |", "|---|---|"]
    for field in dataclasses.fields(MoEConfig):
        meaning = described[field.name].replace("*", r"\*")
        rows.append(f"| `{field.name}` | {meaning[:1].upper()}{meaning[1:]} {values(field)} |")
    return "\n".join(rows) + "\n"


def component_table() -> str:
    """A row for each component."""
    rows = ["| component | field | meaning |", "|---|---|---|"]
    fields = {RouterRule: "router", ActivationRule: "activation"}
    for kind in kinds(Component):
        field = next((field for base, field in fields.items() if issubclass(kind, base)), None)
        home = "maxmoe" if hasattr(maxmoe, kind.__name__) else kind.__module__
        home = "maxmoe.nn" if hasattr(maxmoe.nn, kind.__name__) else home
        meaning = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").replace("*", r"\*")
        rows.append(f"| `{home}.{kind.__name__}` | `{field or OWN_FIELDS[kind]}` | {meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(config_table(), component_table(), sep="\n")
