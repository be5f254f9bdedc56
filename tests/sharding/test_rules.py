"""LogicalRules: tables, overrides, files and their errors; presets; from logical names to the axes of a mesh."""

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from maxmoe.sharding import DroppedAxis, LogicalRules, P, logical_to_mesh_axes, resolve
from support.golden_fixtures import FOLDER

# MaxText's rule tables, and the specs that flax resolved: commit e591f30c; 9056a35a for fsdp-as-dp-for-attn.
TABLES: list[dict[str, Any]] = json.loads((FOLDER / "sharding.json").read_text())
NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "maxmoe/sharding/presets").glob("*.yaml"))


def test_axes_are_tuples_in_the_order_of_the_table() -> None:
    rules = LogicalRules([("exp", "expert"), ["embed", ["fsdp", "tensor"]], ("norm", None), ("exp", ())])
    assert list(rules) == [("exp", ("expert",)), ("embed", ("fsdp", "tensor")), ("norm", ()), ("exp", ())]
    assert rules == LogicalRules(rules) and hash(rules) == hash(LogicalRules(rules))
    assert repr(LogicalRules([("exp", "expert")])) == "LogicalRules([('exp', ('expert',))])"
    assert copy.deepcopy(rules) == rules == pickle.loads(pickle.dumps(rules))


def test_override_replaces_every_rule_of_a_name_and_goes_last() -> None:
    rules = LogicalRules([("a", "x"), ("b", "y"), ("a", "z"), ("c", "x")])
    assert rules.override([("a", "w"), ("d", None), ("a", "v")]) == LogicalRules(
        [("b", "y"), ("c", "x"), ("a", "w"), ("d", None), ("a", "v")]
    )
    assert rules.override([]) == rules
    assert type(rules.override([])) is LogicalRules


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("a", "x"), ("b", ("x", "x"))], "rule 1, 'b', has the axis 'x' twice: ('x', 'x')"),
        ([("a", 3)], "rule 0, 'a', must be None, an axis or a tuple of axes, got 3"),
        ([("a",)], "rule 0 must be a logical name and its axes, got ('a',)"),
        ([(None, "x")], "rule 0 must be a logical name and its axes, got (None, 'x')"),
        ([("", "x")], "rule 0 must be a logical name and its axes, got ('', 'x')"),
        (["ab"], "rule 0 must be a logical name and its axes, got 'ab'"),
    ],
)
def test_errors_name_the_rule(rules, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LogicalRules(rules)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LogicalRules().override(rules)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    expected = LogicalRules(
        [("exp", "expert"), ("embed", ("fsdp", "tensor")), ("norm", ()), ("norm", ()), ("exp", "fsdp")]
    )
    for suffix in ("yaml", "yml"):
        path = tmp_path / f"rules.{suffix}"
        path.write_text("# mine\n- exp: expert\n- embed: [fsdp, tensor]\n\n- norm: []\n- norm:\n- exp: [fsdp]\n")
        assert LogicalRules.load(path) == LogicalRules.load(str(path)) == expected


ENTRY = "must be like '- exp: [expert]', got"
# Nine axes to the power of nine, if aliases were written out.
ALIASES = "".join(f"- l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else 'lol'] * 9)}]\n" for n in range(9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " rules must be a list like '- exp: [expert]', got None"),
        ("exp: [expert]\n", " rules must be a list like '- exp: [expert]', got {'exp': ['expert']}"),
        ("- exp: [expert]\n- norm\n", f" rule 1 {ENTRY} 'norm'"),
        ("- exp: [expert]\n  norm: []\n", f" rule 0 {ENTRY} {{'exp': ['expert'], 'norm': []}}"),
        ("- a: x\n- {exp: x, exp: y}\n", "2: not YAML: the key 'exp' is written twice"),
        ("- a: x\n- b: [x, 7]\n", " rule 1, 'b', must be None, an axis or a tuple of axes, got ['x', 7]"),
        ("- [a]: x\n", "1: not YAML: found unhashable key"),
        ("- a: x\n- b: [x\n", "3: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("- a: x\n- b: !other y\n", "2: not YAML: could not determine a constructor for the tag '!other'"),
        ('- a: x\n- b: !!python/object/apply:os.system ["x"]\n', "2: not YAML: could not determine a constructor for"),
        ("- a: !!timestamp a\n", " 'NoneType' object has no attribute"),
        ("- a: x\n---\n- b: x\n", "2: not YAML: but found another document"),
        (f"- a: x\n- {'n' * 30000}", f" rule 1 {ENTRY} 'nnn"),
        (ALIASES, " rule 0, 'l0', has the axis 'lol' twice: ['lol', "),
        (f"- a: {'[' * 1000}", " maximum recursion depth exceeded"),
        ("- a: x\n- b: \x01\n", " unacceptable character #x0001: special characters are not allowed"),
    ],
    ids=lambda value: value[:40],
)
def test_errors_name_file_and_line_or_rule(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}:{message}')}") as error:
        LogicalRules.load(path)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_rules_that_are_not_there(tmp_path: Path) -> None:
    for path in (str(tmp_path / "rules.yaml"), tmp_path / "default"):
        with pytest.raises(FileNotFoundError, match=Path(path).name):
            LogicalRules.load(path)
    for source in (None, 3, [("exp", "expert")], {"exp": "expert"}):
        message = f"rules must be LogicalRules, a preset or a path, got {source!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            LogicalRules.load(source)
    message = r"^there is no preset 'ep_tp', only (.*); a path ends in \.yaml or \.yml$"
    with pytest.raises(ValueError, match=message) as error:
        LogicalRules.load("ep_tp")
    assert all(name in str(error.value) for name in NAMES)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["rule"])
def test_presets_agree_with_maxtext_in_the_names_and_axes_they_share(table) -> None:
    ours, golden = LogicalRules.load(table["rule"]), LogicalRules(table["rules"])
    axes = {axis for _, rule_axes in ours for axis in rule_axes}

    def of(rules: LogicalRules, name: str) -> list[tuple[str, ...]]:
        found = [tuple(axis for axis in rule_axes if axis in axes) for key, rule_axes in rules if key == name]
        return [rule_axes for rule_axes in dict.fromkeys(found) if rule_axes]

    # Once routed, the batch leaves the expert axis to the experts. MaxText has two names for the length.
    names = {name for name, _ in ours} - {"activation_batch_moe", "activation_length_moe"}
    if table["rule"] == "fsdp-as-dp-for-attn":
        assert (of(ours, "embed_attn"), of(ours, "embed_router")) == ([("expert",)], [])
        names.remove("embed_router")  # replicated here; newer than the table of MaxText
    # Tables without a rule of their own for attention and router call their dim "embed".
    theirs = {name: name if name in dict(golden) else "embed" for name in ("embed_attn", "embed_router")}
    pairs = {name: (of(ours, name), of(golden, theirs.get(name, name))) for name in names}
    differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    assert not differ


def test_presets_have_the_same_clean_names() -> None:
    """tests/costs/expected shows what each of them does."""
    names = {name for name, _ in LogicalRules.load("default")}
    weights = {name for name in names if not name.startswith("activation_")}
    assert {name for name in weights if name.endswith("_moe")} == {"embed_moe", "mlp_moe"}
    assert not {name for name in names if "no_fsdp" in name}
    for preset in NAMES:
        assert {name for name, _ in LogicalRules.load(preset)} == names


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
def test_specs_are_those_of_flax() -> None:
    assert sum(len(table["cases"]) for table in TABLES) == 536
    for table in TABLES:
        for case in table["cases"]:
            found = logical_to_mesh_axes(case["logical"], LogicalRules(table["rules"]))
            assert found == P(*case["spec"]), (table["rule"], case["logical"])


def test_a_rule_without_axes_settles_its_dim() -> None:
    assert logical_to_mesh_axes(("a", None), LogicalRules([("a", None), ("a", "x")]), strict=True) == P(None, None)


def test_names_that_are_repeated_or_unknown() -> None:
    rules = LogicalRules([("exp", "expert"), ("embed", "fsdp"), ("embed", "x"), ("embed_moe", "fsdp")])
    for strict in (False, True):
        message = re.escape("dims 0 and 2 have the same logical name 'exp': ('exp', None, 'exp')")
        with pytest.raises(ValueError, match=f"^{message}$"):
            logical_to_mesh_axes(("exp", None, "exp"), rules, strict=strict)
    near, far = "the nearest are 'embed_moe', 'embed'", "there are 'embed', 'embed_moe', 'exp'"
    for name, hint in (("embd_moe", near), ("qqq", far)):
        message = f"no rule for the logical name '{name}' of ('exp', '{name}'); {hint}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            logical_to_mesh_axes(("exp", name), rules, strict=True)
        with pytest.warns(UserWarning, match=f"^{re.escape(f'{message}; its dim is not sharded')}$") as warnings:
            assert logical_to_mesh_axes(("exp", name), rules) == P("expert", None)
        assert len(warnings) == 1 and warnings[0].filename == __file__


def test_the_reasons_for_dropping() -> None:
    spec = P(("absent", "fsdp", "one", "expert", "context"), ("tensor",), None)
    kept, dropped = resolve(spec, {"one": 1, "fsdp": 2, "expert": 4, "context": 3, "tensor": 3}, (12, 8, 5))
    assert kept == P(("fsdp", "context"), None, None)
    assert dropped == (
        DroppedAxis("absent", 0, "the mesh has no such axis"),
        DroppedAxis("one", 0, "its size is 1"),
        DroppedAxis("expert", 0, "12 is not divisible by 2 * 4"),
        DroppedAxis("tensor", 1, "8 is not divisible by 3"),
    )


def test_strict_refuses_a_dim_that_does_not_divide() -> None:
    """It still drops absent axes and axes of size one."""
    where = "axis 'expert' of P(None, ('fsdp', 'expert')) cannot shard dim 1 of the shape (8, 6)"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{where}: 6 is not divisible by 2 * 4')}$"):
        resolve(P(None, ("fsdp", "expert")), {"fsdp": 2, "expert": 4}, (8, 6), strict=True)
    resolution = resolve(P(("absent", "one"), "fsdp"), {"one": 1, "fsdp": 2}, (3, 4), strict=True)
    assert resolution.spec == P(None, "fsdp")
    assert [drop.axis for drop in resolution.dropped] == ["absent", "one"]


def test_a_spec_has_one_entry_per_dim() -> None:
    for shape in ((), (4,), (4, 4, 4)):
        message = f"P('fsdp', None) has 2 dims, the shape {shape} has {len(shape)}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            resolve(P("fsdp", None), {"fsdp": 2}, shape)
