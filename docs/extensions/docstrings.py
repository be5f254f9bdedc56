"""From docstrings to the pages of docs/api: every public name once, its formulas, and the examples that use it."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

from maxmoe import MoEConfig

ROOT = Path(__file__).parents[2]
# What reStructuredText would take for an unclosed literal, `names`s, and for the number of a list, K.
ESCAPES = ((r"(?<!`)(`[^`]+`)s\b", r"\1\\ s"), (r"^(\s*\w+: )([A-Z])\.$", r"\1``\2``."))
# Of properties napoleon takes what is before a colon in the first line for a type; it does not know this one.
COLON = "\ufe55"
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")
FULL_NAME = re.compile(r"maxmoe(\.\w+)+(\(\))?")
# A name that several of them export is described in the first one.
PACKAGES = (
    "maxmoe",
    "maxmoe.config",
    "maxmoe.ops",
    "maxmoe.quantization",
    "maxmoe.expert_load",
    "maxmoe.nn",
    "maxmoe.convert.quantized_merge",
    "maxmoe.convert.saliency",
    "maxmoe.convert.surgery",
    "maxmoe.presets",
    "maxmoe.models",
    "maxmoe.optim",
    "maxmoe.sharding",
    "maxmoe.parallel",
    "maxmoe.pipelining",
    "maxmoe.parallel.dispatch",
    "maxmoe.costs",
    "maxmoe.integrations.transformers",
    "maxmoe.integrations.lightning",
    "maxmoe.convert.checkpoint",
    "maxmoe.testing",
    "maxmoe.reference",
)


@cache
def homes() -> dict[int, str]:
    """Where every public object is described, by its id."""
    found: dict[int, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in public_names(module):
            found.setdefault(id(getattr(module, name)), package)
    return found


def public_names(module: ModuleType) -> list[str]:
    """The names that a module exports, modules among them left out."""
    of_module = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    names = getattr(module, "__all__", None) or [name for name in of_module if not name.startswith("_")]
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


# Methods of layers that torch and other parts of maxmoe call.
INTERNAL = {
    "balanced_router",
    "compute_others",
    "declaration",
    "expert_dtype",
    "expert_function",
    "extra_repr",
    "hidden_states_and_routing",
    "in_one_operator",
    "latent_projections",
    "losses_and_stats",
    "observed",
    "route",
    "routed_experts",
}


def skip(app: Sphinx, what: str, name: str, value: object, skipped: bool, options: Any) -> bool | None:
    """Leave out what another page describes, and methods of torch that say nothing new."""
    package = app.env.current_document.docname.removeprefix("api/")
    if what == "module" and homes().get(id(value), package) != package:
        return True
    is_field = (getattr(value, "__doc__", None) or "").startswith("Alias for field number")  # described in Attributes
    if is_field or (what == "class" and name in INTERNAL):
        return True
    return None


def process(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Set formulas as they are written, and name what uses the object."""
    for pattern, replacement in ESCAPES:
        lines[:] = [re.sub(pattern, replacement, line) for line in lines]
    lines[:] = [line for paragraph in with_code(paragraphs(lines)) for line in (*with_formula(paragraph), "")]
    if what == "property":
        lines[:1] = [line.replace(":", COLON) for line in lines[:1]]
    if (
        what == "function"
        and name.startswith("maxmoe.presets.")
        and set(inspect.signature(value).parameters) == {"overrides"}
    ):
        lines += preset_code(value())
    if what in ("class", "function") and (users := used_in(name.rpartition(".")[2])):
        lines += [f"**Used in:** {', '.join(map(link_to_example, users))}", ""]


def restore_colons(app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:
    """Undo, after napoleon, what `process` did to properties."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def paragraphs(lines: list[str]) -> list[list[str]]:
    """Split at empty lines."""
    return [block.splitlines() for block in re.split(r"\n\s*\n", "\n".join(lines)) if block.strip()]


def with_code(paragraphs: list[list[str]]) -> list[list[str]]:
    """Make code blocks of indented paragraphs that stand in no section; those that follow each other are one block."""
    found: list[list[str]] = []
    in_section = in_code = False
    for paragraph in paragraphs:
        is_indented = all(line.startswith("    ") for line in paragraph)
        if not is_indented:
            in_section = any(SECTION.match(line) for line in paragraph)
        if is_indented and not in_section and in_code:
            found[-1] += ["", *paragraph]
        elif is_indented and not in_section and found:
            found[-1][-1] = re.sub("::$", ":", found[-1][-1])
            found.append([f".. code-block:: {language(paragraph)}", "", *paragraph])
        else:
            found.append(paragraph)
        in_code = is_indented and not in_section
    return found


def language(paragraph: list[str]) -> str:
    """Python, if it is; else text."""
    try:
        ast.parse(textwrap.dedent("\n".join(paragraph)))
    except SyntaxError:
        return "text"
    return "python"


def preset_code(config: MoEConfig) -> list[str]:
    """A code block of the fields that a preset sets."""
    plain = {field.name: field.default for field in dataclasses.fields(config)}
    fields = {name: value for name, value in vars(config).items() if value != plain[name]}
    return [
        ".. code-block:: python",
        "",
        "    MoEConfig(",
        *(f"        {k}={v!r}," for k, v in fields.items()),
        "    )",
        "",
    ]


def with_formula(paragraph: list[str]) -> list[str]:
    """Make a literal block of a formula: a paragraph that is no sentence, section, list or part of one of them."""
    first, last = paragraph[0], paragraph[-1]
    if first.startswith("Source:"):
        return [first.replace("Source:", "**Source:**", 1), *paragraph[1:]]
    starts = ("- ", " " * 8, "..")
    is_prose = last.endswith((".", ":")) or first.endswith(":") or first.startswith(starts) or "`" in first
    if is_prose or not re.search(r"[=^_]", first) or (first.startswith(" ") and " = " not in first):
        return paragraph
    return [".. code-block:: text", "", *(f"    {line.strip()}" for line in paragraph)]


@cache
def uses() -> dict[str, set[str]]:
    """The names of the package that every script and notebook in examples/ uses, by its path."""
    found = {}
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix == ".py":
            cells = [path.read_text()]
        elif path.suffix == ".ipynb":
            cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if "outputs" in cell]
        else:
            continue
        found[path.relative_to(ROOT).as_posix()] = names_used("\n".join(cells))
    return found


def names_used(code: str) -> set[str]:
    """What is imported from maxmoe, and the attributes of what is imported."""
    nodes = list(ast.walk(ast.parse(code)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("maxmoe")]
    imported = {alias.name for node in imports for alias in node.names}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    of_package = {node.attr for node in attributes if ast.unparse(node.value).split(".")[0] in {"maxmoe", *imported}}
    return imported | of_package


def used_in(name: str) -> list[str]:
    """The examples that use a name."""
    return [path for path, names in uses().items() if name in names]


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> nodes.Element | None:
    """Link a class in backticks, wherever it is described; show what is nobody's as code, as arguments and files.

    A full name must be one of ours.
    """
    domain, target = env.domains["py"], node["reftarget"]
    if node.get("reftype") != "obj" or target.startswith("maxmoe."):
        return None
    found = [name for name in domain.objects if name.endswith(f".{target}")] if target[:1].isupper() else []
    if len(found) != 1:
        return content
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, content) or content


def link_names(app: Sphinx, document: nodes.document) -> None:
    """Link what pages name in full, as code: `maxmoe.nn.Dispatcher`."""
    for literal in list(document.findall(nodes.literal)):
        is_linked = isinstance(literal.parent, nodes.reference | nodes.title | pending_xref)
        if is_linked or not FULL_NAME.fullmatch(literal.astext()):
            continue
        place = {"refdomain": "py", "refdoc": app.env.current_document.docname}
        reference = pending_xref("", reftype="obj", reftarget=literal.astext().removesuffix("()"), **place)
        literal.replace_self(reference)
        reference += literal


def link_to_example(path: str) -> str:
    """Link a notebook by its page; scripts have none."""
    folder, _, file = path.rpartition("/")
    return f":doc:`/notebooks/{file.removesuffix('.ipynb')}`" if folder == "examples/notebooks" else f"``{path}``"


def check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names without a description."""
    described = env.domains["py"].objects
    for package in PACKAGES:
        for name in public_names(importlib.import_module(package)):
            home = homes()[id(getattr(importlib.import_module(package), name))]
            if f"{home}.{name}" not in described:
                logging.getLogger(__name__).warning("%s.%s is public and has no description", home, name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to autodoc, before napoleon."""
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-process-docstring", restore_colons, priority=600)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
