"""Reads damaged and invented files of rules, and checks mistyped tables.

A file is read as PyYAML reads it, or refused with a ValueError of one line that begins with its path, in a moment and
without much memory. A name without effect is refused, an empty table is not.
"""

import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import yaml

from maxmoe.costs import explain
from maxmoe.models import Decoder
from maxmoe.sharding import LogicalRules, Mesh, check_used
from maxmoe.sharding.rules import PRESETS as FOLDER
from support.memory import at_most
from support.parallel_decoder import CONFIG

PRESETS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.yaml"))}
AXES = ["data", "stage", "fsdp", "fsdp_transpose", "context", "tensor", "expert"]
NAMES = sorted(LogicalRules.load("default").names)
MODEL = Decoder(CONFIG, device="meta")
PIECES = [
    *"[]{}:,&*!|>'\"%@`?-#~=<\t\n\r \\",
    *["- ", ": ", "[[", "]]", "- - ", "? ", "<<: ", "---\n", "...\n", "%YAML 1.1\n", "%TAG ! x\n", "&a", "*a"],
    *["&a [*a]", "null", "~", "yes", "exp", "[expert]", "1e999", "0x", "0o8", "1:2:3", ".nan", "!!set", "!<x>"],
    *["!!python/object/apply:os.system [true]", "!!binary x", "!!int a", "!!str 3", "2024-13-45", "\\U00110000"],
    *["2024-01-01T99:99:99", '"\\ud800"', '"\\U99999999"', "\ufeff", "\x00", "\x85", "\u2028", "é", "𝄞"],
    *["9" * 5000, "a" * 2000],
]
SECONDS = 20  # processor time for a file, on a busy machine
BYTES = 2**28  # memory for a case, including imports
LONG = 2**15  # bytes, which PyYAML reads in a moment


def invented(random: Random) -> str:
    """Make a table, or something similar."""
    if random.random() < 0.3:
        return "".join(random.choice(PIECES) for _ in range(random.choice([3, 10, 30])))
    if random.random() < 0.2:
        piece = random.choice(PIECES)
        return random.choice(["- a: ", "", "- a: x\n"]) + piece * random.choice([10, 1000, 40000 // len(piece)])
    return "".join(f"- {scalar(random)}: {axes(random)}\n" for _ in range(random.randint(0, 12)))


def scalar(random: Random) -> str:
    return random.choice([*AXES, *NAMES, random.choice(PIECES), f"'{random.choice(AXES)}'"])


def axes(random: Random) -> str:
    some = [scalar(random) for _ in range(random.randint(0, 3))]
    return random.choice([f"[{', '.join(some)}]", " ".join(some[:1]), "".join(f"\n  - {axis}" for axis in some)])


def damaged(random: Random) -> bytes:
    """Change a preset, or an invented table."""
    data = bytearray((random.choice(list(PRESETS.values())) if random.random() < 0.5 else invented(random)).encode())
    for _ in range(random.choice([0, 0, 1, 1, 2, 8])):
        if len(data) > LONG:
            break
        begin, end = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
        match random.randrange(5):
            case 0:
                data[begin : begin + 1] = bytes([random.randrange(256)])
            case 1:
                data[begin:end] = b""
            case 2:
                data[begin:begin] = data[begin:end] * random.choice([1, 1, 30 if len(data) < LONG // 30 else 1])
            case 3:
                data[begin:begin] = random.choice(PIECES).encode()
            case _:
                text = data.decode(errors="replace")
                data = bytearray(text.encode(random.choice(["utf-16", "utf-32", "latin-1"]), "replace"))
    return bytes(data)


def read_file(random: Random) -> str:
    """Read a file that may be anything."""
    with tempfile.TemporaryDirectory() as folder:
        path, data = Path(folder) / "rules.yaml", damaged(random)
        path.write_bytes(data)
        began = time.process_time()
        try:
            rules = LogicalRules.load(path)
        except ValueError as error:
            message = str(error)
            if not message.startswith(f"{path}:") or not message.isprintable() or len(message) > 600:
                raise AssertionError(f"the message is {message[:300]!r}") from error
            outcome = "file refused"
        else:
            assert list(rules) == by_pyyaml(data), "it is read otherwise"
            outcome = "file read"
    assert time.process_time() - began < SECONDS, "it takes long"
    return outcome


def by_pyyaml(data: bytes) -> list[tuple[str, tuple[str, ...]]]:
    """Read a good file with PyYAML: no duplicate keys, values are strings and lists of strings."""
    rules = []
    for rule in yaml.safe_load(data.decode()):
        ((name, value),) = rule.items()
        entries = [value] if isinstance(value, str) else value or []
        assert all(isinstance(part, str) and part for part in (name, *entries)), "not a rule"
        rules.append((name, tuple(entries)))
    return rules


def mistyped(random: Random, word: str) -> str:
    """Change one or two letters."""
    for _ in range(random.choice([1, 1, 2])):
        place, letter = random.randrange(len(word) + 1), random.choice("abcdefghijklmnopqrstuvwxyz_")
        keep = random.choice([0, 1])
        word = word[:place] + random.choice([letter, "", word[place : place + 1]]) + word[place + keep :]
    return word or "x"


def names_without_effect(random: Random) -> str:
    """Write a mesh and rules with typos, or without."""
    sizes = {axis: random.choice([1, 1, 2, 2, 4]) for axis in random.sample(AXES, random.randint(0, 4))}
    rules: list[tuple[str, Any]] = [*LogicalRules.load(random.choice(list(PRESETS)))]
    if random.random() < 0.3:
        rules = random.sample(rules, random.randint(0, len(rules)))
    for _ in range(random.choice([0, 1, 1, 2])):
        match random.randrange(3):
            case 0 if sizes:
                axis = random.choice(list(sizes))
                sizes[mistyped(random, axis)] = sizes.pop(axis)
            case 1 if rules:
                place = random.randrange(len(rules))
                rules[place] = (mistyped(random, rules[place][0]), rules[place][1])
            case _ if rules:
                place = random.randrange(len(rules))
                changed = [mistyped(random, axis) for axis in rules[place][1]]
                rules[place] = (rules[place][0], list(dict.fromkeys(changed)))
    used = {axis for _, some in rules for axis in some}
    unused = {axis for axis, size in sizes.items() if size > 1} - used
    unused |= {name for name, _ in rules} - set(NAMES) | used - set(AXES) - set(sizes)
    mesh, table = Mesh.planned(sizes), LogicalRules(rules)
    for call in (check_used, lambda mesh, table: explain(MODEL, mesh, table, dispatch="gather_weights")):
        try:
            call(mesh, table)
        except ValueError as error:
            if not any(f"the axis '{name}'" in str(error) or f"the name '{name}'" in str(error) for name in unused):
                raise AssertionError(f"{sizes} {rules}: {error}") from error
        else:
            assert not unused, f"{sizes} {rules}: {unused} pass"
    try:
        explain(MODEL, mesh, table, allow_unused=True)
    except ValueError as error:
        if "num_experts must" not in str(error) and "the rule 'exp' must" not in str(error):
            raise AssertionError(f"{sizes} {rules}: {error}") from error
    return "typo refused" if unused else "names accepted"


def one_case(random: Random) -> str:
    """Do one of these."""
    with at_most(BYTES):
        return random.choice([read_file, names_without_effect])(random)
