"""From logical names to a spec, and to the axes that mesh and shape allow, against a second implementation."""

import itertools
import math
import random
import re

import pytest

from maxmoe.sharding import DroppedAxis, LogicalRules, P, PartitionSpec, logical_to_mesh_axes, resolve
from sharding.golden_sharding import golden_tables

TABLES = golden_tables()
AXES = ("data", "fsdp", "context", "tensor", "expert")
NAMES = ("batch", "length", "embed", "mlp", "heads", "exp")


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
def test_specs_are_those_of_flax() -> None:
    assert sum(len(table.cases) for table in TABLES) == 536
    for table in TABLES:
        for names, spec in table.cases:
            assert logical_to_mesh_axes(names, table.rules) == spec, (table.name, names)


def first_applicable_rule(names, rules, spec) -> tuple[int, tuple[str, ...]] | None:
    """The dim and the axes of the first rule of the table that could be applied now."""
    taken = set(itertools.chain.from_iterable(axes for axes in spec if axes is not None))
    applicable = (
        (names.index(name), axes)
        for name, axes in rules
        if name in names and spec[names.index(name)] is None and not taken & set(axes)
    )
    return next(applicable, None)


def by_definition(names, rules) -> PartitionSpec:
    """Apply the first applicable rule of the whole table, until there is none."""
    spec: list[tuple[str, ...] | None] = [None] * len(names)
    while (found := first_applicable_rule(names, rules, spec)) is not None:
        spec[found[0]] = found[1]
    return P(*spec)


def random_axes(draw: random.Random) -> tuple[str, ...]:
    return tuple(draw.sample(AXES, draw.choice((0, 1, 1, 2, 3))))


def random_rules(draw: random.Random) -> LogicalRules:
    return LogicalRules((draw.choice(NAMES), random_axes(draw)) for _ in range(draw.randrange(12)))


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
def test_random_names_and_rules() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        rules = random_rules(draw)
        names = [name if draw.random() < 0.8 else None for name in draw.sample(NAMES, draw.randrange(5))]
        assert logical_to_mesh_axes(names, rules) == by_definition(names, rules), (names, rules)


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


def best_axes(axes, mesh_sizes, length: int) -> tuple[str, ...]:
    """The choice of axes that divides the length and keeps the earliest axes."""
    usable = [axis for axis in axes if mesh_sizes.get(axis, 1) > 1]
    for keep in itertools.product((True, False), repeat=len(usable)):
        kept = tuple(itertools.compress(usable, keep))
        if length % math.prod(mesh_sizes[axis] for axis in kept) == 0:
            return kept
    raise AssertionError("no axes divide every length")


def test_random_specs_meshes_and_shapes() -> None:
    draw = random.Random(1)
    for _ in range(3000):
        shuffled, num_dims = draw.sample(AXES, len(AXES)), draw.randrange(4)
        cuts = sorted(draw.randrange(len(AXES) + 1) for _ in range(num_dims))
        spec = P(*(shuffled[a:b] for a, b in zip([0, *cuts], cuts, strict=False)))
        mesh_sizes = {axis: draw.choice((1, 2, 3, 4)) for axis in draw.sample(AXES, draw.randrange(len(AXES) + 1))}
        shape = tuple(draw.choice((0, 1, 2, 6, 8, 12, 24, 48)) for _ in range(num_dims))
        expected = P(*(best_axes(axes, mesh_sizes, length) for axes, length in zip(spec, shape, strict=True)))
        kept, dropped = resolve(spec, mesh_sizes, shape)
        assert kept == expected, (spec, mesh_sizes, shape)
        assert {(drop.axis, drop.dim) for drop in dropped} == {
            (axis, dim) for dim, axes in enumerate(spec) for axis in axes if axis not in kept[dim]
        }
        assert resolve(kept, mesh_sizes, shape, strict=True) == (kept, ())


def test_the_reasons_for_dropping() -> None:
    spec = P(("absent", "fsdp", "one", "expert"), ("tensor",), None)
    kept, dropped = resolve(spec, {"one": 1, "fsdp": 2, "expert": 4, "tensor": 3}, (6, 8, 5))
    assert kept == P("fsdp", None, None)
    assert dropped == (
        DroppedAxis("absent", 0, "the mesh has no such axis"),
        DroppedAxis("one", 0, "its size is 1"),
        DroppedAxis("expert", 0, "6 is not divisible by 2 * 4"),
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
