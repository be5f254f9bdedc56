"""The table of docs/layer.md: the fields of `maxmoe.MoEConfig`, from its docstring.

python docs/config_table.py
"""

import dataclasses
import inspect
import re
from typing import get_args

from maxmoe import MoEConfig


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
    options = [option for option in get_args(field.type) if isinstance(option, str)]
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


if __name__ == "__main__":
    print(config_table())
