"""Compares steps under random tables of rules with one process's.

A case is a preset and a mesh, with several tables: one to three names of the preset get other axes. Each table must be
refused alike by `explain` and, on every rank, by `parallelize`, or give the outputs, losses, statistics, gradients and
trained parameters of one process. The counts say how many tables of each preset ran, and how many were refused.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch.distributed.tensor import DTensor

from maxmoe.costs import explain
from maxmoe.models import DecoderConfig
from maxmoe.nn import Selection
from maxmoe.parallel import parallelize
from maxmoe.sharding import LogicalRules, Mesh
from maxmoe.sharding.rules import PRESETS as FOLDER
from support.dispatched_layer import FAMILIES, LOSSES
from support.parallel_decoder import BLOCK, CONFIG, MOE, MeshRules, decoder
from support.run_ranks import run_ranks
from support.steps_on_ranks import Case, Expected, check_case, made, of_one_process
from support.trained_decoders import step

AXES = ("data", "fsdp", "fsdp_transpose", "context", "tensor", "expert")
PRESETS = tuple(path.stem for path in sorted(FOLDER.glob("*.yaml")))
DISPATCHES = ("auto", "auto", "ring_of_experts", "ragged_all_to_all", "gather_weights")
LAYERS = {
    **{name: config for name, config in FAMILIES.items() if config.router_rule.takes_ids is None},
    "biases": replace(FAMILIES["deepseek_v3"], expert_bias=True, router=Selection(group_score="max"), **LOSSES),
}
CONFIGS: dict[str, DecoderConfig] = {
    **{name: replace(BLOCK, hidden_size=8, moe=config) for name, config in LAYERS.items()},
    "every part": CONFIG,
    "recomputed": replace(CONFIG, recompute=("blocks",), tie_embeddings=True),
    "odd sizes": replace(
        CONFIG,
        num_key_value_heads=2,
        intermediate_size=10,
        moe=replace(MOE, intermediate_size=6, shared_expert_gate=False, num_experts=12),
    ),
    "capacity": replace(CONFIG, moe=replace(MOE, implementation="dense", capacity_factor=1.0)),
}
OFTEN = ["every part", "recomputed", "odd sizes", "capacity"] * 2


@dataclass(frozen=True)
class Table:
    """A table of rules, the model that runs under it, and the error of `explain` if it refuses the table."""

    overrides: list[tuple[str, tuple[str, ...]]]
    case: Case
    refusal: str | None


def draw_mesh(random: Random, rules: LogicalRules, ranks: Sequence[int]) -> dict[str, int]:
    """Draw axes that the rules have, in any order; `expert` more often than others."""
    axes = axes_of(rules)
    num_ranks, sizes = random.choice(ranks), {}
    random.shuffle(axes)
    if "expert" in axes and random.random() < 0.7:
        axes.sort(key="expert".__ne__)
    for axis in axes:
        left = num_ranks // math.prod(sizes.values())
        if left > 1:
            sizes[axis] = random.choice([size for size in (2, 4, 8) if size <= left])
    if math.prod(sizes.values()) != num_ranks:
        return draw_mesh(random, rules, ranks)
    order = list(sizes)
    random.shuffle(order)
    return {axis: sizes[axis] for axis in order}


def axes_of(table: LogicalRules) -> list[str]:
    return [axis for axis in AXES if any(axis in axes for _, axes in table)]


def draw_table(random: Random, name: str, sizes: dict[str, int]) -> Table:
    """Assign random axes to one to three names of a preset, axes of the mesh more often than others."""
    preset, overrides = LogicalRules.load(name), []
    for of_dim in random.sample(sorted(preset.names - {"layers"}), random.choice([1, 1, 2, 3])):
        axes = list(sizes) if random.random() < 0.8 else axes_of(preset)
        overrides.append((of_dim, tuple(random.sample(axes, min(len(axes), random.choice([0, 1, 1, 1, 2, 3]))))))
    rules = preset.override(overrides)
    if random.random() < 0.5:  # the new rules come first: they get their axes before all others
        rules = LogicalRules([*rules[-len(overrides) :], *rules[: -len(overrides)]])
    config, options = random.choice([*CONFIGS, *OFTEN]), {"dispatch": random.choice(DISPATCHES)}
    model = made(decoder, CONFIGS[config])
    case = Case(config, MeshRules(name, sizes), model, step, rules=rules, options=options, tolerance=1e-11)
    try:
        explain(model(), Mesh.planned(sizes), rules, allow_unused=True, **options)
    except ValueError as error:
        return Table(overrides, case, str(error))
    return Table(overrides, case, None)


def check_refusal(table: Table) -> None:
    """`parallelize` raises the error of `explain`, and changes nothing."""
    case = table.case
    model = case.model()
    with pytest.raises(ValueError, match=f"^{re.escape(table.refusal or '')}$"):
        parallelize(model, Mesh(case.layout.sizes), case.rules, allow_unused=True, **case.options)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def one_case(random: Random, tables: int = 10, ranks: Sequence[int] = (2, 2, 4, 4, 8)) -> Counter[str]:
    """Run the tables of one preset on one mesh; count those that ran and those that were refused."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name = random.choice(PRESETS)
    sizes = draw_mesh(random, LogicalRules.load(name), ranks)
    drawn: list[tuple[Table, Expected | None]] = []
    for _ in range(tables):
        table = draw_table(random, name, sizes)
        drawn.append((table, None if table.refusal else of_one_process(table.case.model, table.case.train)))

    def check() -> None:
        for table, expected in drawn:
            try:
                check_refusal(table) if expected is None else check_case(table.case, expected)
            except Exception as error:
                raise AssertionError(f"{table.case}, {table.case.options}, {table.overrides}: {error}") from error

    try:
        run_ranks(check, math.prod(sizes.values()), timeout=60.0)
    except RuntimeError as error:
        raise RuntimeError(f"{name} on {sizes}: {str(error)[-1500:]}") from error
    outcomes = Counter("refused" if table.refusal is not None else "ran" for table, _ in drawn)
    return Counter({f"{name} on {math.prod(sizes.values())}: {what}": count for what, count in outcomes.items()})
