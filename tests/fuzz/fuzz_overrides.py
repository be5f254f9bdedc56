"""Compares steps under random tables of rules with one process's.

A case is a preset and a mesh, with several tables: one to three names of the preset get other axes. Each table must be
refused alike by `explain` and, on every rank, by `parallelize`, or give the outputs, losses, statistics and gradients
of one process, in a layer or in a decoder. The counts say how many tables of each preset ran, and how many were
refused.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fuzz.fuzz_dispatch import AXES, draw_mesh
from maxmoe.costs import explain
from maxmoe.models import DecoderConfig
from maxmoe.nn import Selection
from maxmoe.parallel import parallelize, parameter_shardings, token_sharding
from maxmoe.sharding import LogicalRules, Mesh
from maxmoe.sharding.rules import PRESETS as FOLDER
from support import parallel_decoder
from support.dispatched_layer import (
    FAMILIES,
    LOSSES,
    Outcome,
    check_part,
    make_batch,
    make_layer,
    take_step,
)
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_ranks

PRESETS = tuple(path.stem for path in sorted(FOLDER.glob("*.yaml")))
DISPATCHES = ("auto", "auto", "ring_of_experts", "ragged_all_to_all", "gather_weights")
LAYERS = {
    **FAMILIES,
    "biases": replace(FAMILIES["deepseek_v3"], expert_bias=True, router=Selection(group_score="max"), **LOSSES),
}
DECODERS: dict[str, DecoderConfig] = {
    "decoder": parallel_decoder.CONFIG,
    "recomputed decoder": replace(parallel_decoder.CONFIG, recompute=("blocks",), tie_embeddings=True),
    "decoder of odd sizes": replace(
        parallel_decoder.CONFIG,
        num_key_value_heads=2,
        intermediate_size=10,
        moe=replace(parallel_decoder.MOE, intermediate_size=6, shared_expert_gate=False, num_experts=12),
    ),
    "decoder with capacity": replace(
        parallel_decoder.CONFIG,
        moe=replace(parallel_decoder.MOE, implementation="dense", capacity_factor=1.0),
    ),
}
TOLERANCE = 1e-11


@dataclass(frozen=True)
class Table:
    """A table of rules, the model that runs under it, and the error of `explain` if it refuses the table."""

    overrides: list[tuple[str, tuple[str, ...]]]
    rules: LogicalRules
    model: str
    dispatch: str
    refusal: str | None


def axes_of(table: LogicalRules) -> list[str]:
    return [axis for axis in AXES if any(axis in axes for _, axes in table)]


def draw_table(random: Random, preset: LogicalRules, sizes: dict[str, int]) -> Table:
    """Assign random axes to one to three names of a preset, axes of the mesh more often than others."""
    names = random.sample(sorted(preset.names - {"layers"}), random.choice([1, 1, 2, 3]))
    overrides = []
    for name in names:
        axes = list(sizes) if random.random() < 0.8 else axes_of(preset)
        overrides.append((name, tuple(random.sample(axes, min(len(axes), random.choice([0, 1, 1, 1, 2, 3]))))))
    table = preset.override(overrides)
    if random.random() < 0.5:  # the new rules come first: they get their axes before all others
        table = LogicalRules([*table[-len(overrides) :], *table[: -len(overrides)]])
    model, dispatch = random.choice([*LAYERS, *DECODERS, *DECODERS]), random.choice(DISPATCHES)
    try:
        explain(make_model(model), Mesh.planned(sizes), table, dispatch=dispatch, allow_unused=True)
        refusal = None
    except ValueError as error:
        refusal = str(error)
    return Table(overrides, table, model, dispatch, refusal)


def make_model(name: str) -> nn.Module:
    return make_layer(LAYERS[name]) if name in LAYERS else parallel_decoder.decoder(DECODERS[name])


@cache
def layer_of_one_process(name: str) -> Outcome:
    return take_step(make_layer(LAYERS[name]), make_batch(LAYERS[name], "of the router"))


def check_layer(name: str, mesh: Mesh, table: Table) -> None:
    layer, batch = make_layer(LAYERS[name]), make_batch(LAYERS[name], "of the router")
    shardings = parameter_shardings(layer, mesh, table.rules, allow_unused=True)
    parallelize(layer, mesh, table.rules, allow_unused=True, dispatch=table.dispatch)
    part = token_sharding(mesh, table.rules).slices(batch.x.shape[:2])
    check_part(take_step(layer, batch.part(part)), layer_of_one_process(name), part, shardings, TOLERANCE)


def check_decoder(name: str, mesh: Mesh, table: Table) -> None:
    config = DECODERS[name]
    model, expected = parallel_decoder.decoder(config), parallel_decoder.step_of_one_process(config)
    shardings = parameter_shardings(model, mesh, table.rules, allow_unused=True)
    parallelize(model, mesh, table.rules, allow_unused=True, dispatch=table.dispatch)
    batch = parallel_decoder.batch()
    part = token_sharding(mesh, table.rules).slices(batch[0].shape)
    output = model(batch[0][part])
    parallel_decoder.loss(output, batch[1][part]).backward()
    assert_same(output.logits, expected.output.logits[part], "logits", tolerance=TOLERANCE)
    assert_same(output.aux_loss, expected.output.aux_loss, "aux_loss", tolerance=TOLERANCE)
    for stats, stats_of_one in zip(output.stats, expected.output.stats, strict=True):
        assert stats.tokens_per_expert.equal(stats_of_one.tokens_per_expert)
    for parameter_name, parameter in model.named_parameters():
        gradient, whole = parameter.grad, expected.gradients[parameter_name]
        sharding = shardings[parameter_name].sharding
        assert isinstance(gradient, DTensor) and gradient.placements == sharding.placements, parameter_name
        assert_same(
            gradient.to_local(),
            part_by_definition(whole, sharding.spec, mesh),
            f"gradient of {parameter_name}",
            scale=float(whole.abs().max()),
            tolerance=TOLERANCE,
        )


def check_refusal(table: Table, mesh: Mesh) -> None:
    """`parallelize` raises the error of `explain`, and changes nothing."""
    model = make_model(table.model)
    with pytest.raises(ValueError, match=f"^{re.escape(table.refusal or '')}$"):
        parallelize(model, mesh, table.rules, allow_unused=True, dispatch=table.dispatch)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def one_case(random: Random, tables: int = 10, ranks: Sequence[int] = (2, 2, 4, 4, 8)) -> Counter[str]:
    """Run the tables of one preset on one mesh; count those that ran and those that were refused."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name = random.choice(PRESETS)
    sizes = draw_mesh(random, LogicalRules.load(name), ranks)
    drawn = [draw_table(random, LogicalRules.load(name), sizes) for _ in range(tables)]

    def check() -> None:
        mesh = Mesh(sizes)
        for table in drawn:
            try:
                if table.refusal is not None:
                    check_refusal(table, mesh)
                elif table.model in LAYERS:
                    check_layer(table.model, mesh, table)
                else:
                    check_decoder(table.model, mesh, table)
            except Exception as error:
                raise AssertionError(f"{table.model}, {table.dispatch}, {table.overrides}: {error}") from error

    try:
        run_ranks(check, math.prod(sizes.values()), timeout=60.0)
    except RuntimeError as error:
        raise RuntimeError(f"{name} on {sizes}: {str(error)[-1500:]}") from error
    outcomes = Counter("refused" if table.refusal is not None else "ran" for table in drawn)
    return Counter({f"{name} on {math.prod(sizes.values())}: {what}": count for what, count in outcomes.items()})
