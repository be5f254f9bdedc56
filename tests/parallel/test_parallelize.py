"""A parallelized Decoder against one process: logits, losses, statistics, gradients and a step of the optimizer."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from maxmoe.models import DecoderConfig
from maxmoe.models.decoder import DecoderOutput
from maxmoe.sharding import Assignment, LogicalRules, Mesh, PartitionSpec, assign, parallelize
from support.parallel_decoder import (
    VARIANTS,
    MeshRules,
    batch,
    decoder,
    layouts,
    loss,
    optimizer,
    step_of_one_process,
    token_spec,
)
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:no rule for the logical name")


def check_parts(
    found: dict[str, Tensor | None], whole: dict[str, Tensor], assignments: dict[str, Assignment], what: str
) -> None:
    """Every DTensor lies where `assign` says, and is the part by definition of what one process has."""
    assert found.keys() == assignments.keys() == whole.keys()
    for name, assignment in assignments.items():
        tensor, sharding = found[name], assignment.sharding
        assert isinstance(tensor, DTensor), (what, name)
        assert tensor.shape == whole[name].shape and tensor.placements == sharding.placements, (what, name)
        part = part_by_definition(whole[name], sharding.spec, sharding.mesh)
        assert_same(tensor.detach().to_local(), part, f"{what} {name}", scale=float(whole[name].abs().max()))


def check_output(output: DecoderOutput, expected: DecoderOutput, spec: PartitionSpec, mesh: Mesh) -> None:
    assert_same(output.logits, part_by_definition(expected.logits, spec, mesh), "logits")
    assert_same(output.aux_loss, expected.aux_loss, "aux_loss")
    assert len(output.stats) == len(expected.stats)
    for stats, expected_stats in zip(output.stats, expected.stats, strict=True):
        assert stats.tokens_per_expert.equal(expected_stats.tokens_per_expert)
        assert stats.dropped.equal(expected_stats.dropped)
        assert_same(stats.router_entropy, expected_stats.router_entropy, "router_entropy")


def check_step(config: DecoderConfig, layout: MeshRules) -> None:
    expected = step_of_one_process(config)
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    assignments = assign(decoder(config), mesh, rules)
    model = parallelize(decoder(config), mesh, rules)
    check_parts(dict(model.named_parameters()), expected.before, assignments, "parameter")

    spec = token_spec(mesh, rules)
    tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
    if layout.world_size == 4:
        with torch.no_grad():
            check_output(model(tokens), expected.output, spec, mesh)
    descent = optimizer(model)  # made of shards, the evaluation notwithstanding
    output = model(tokens)
    loss(output, targets).backward()
    check_output(output, expected.output, spec, mesh)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    check_parts(gradients, expected.gradients, assignments, "gradient of")
    descent.step()
    check_parts(dict(model.named_parameters()), expected.after, assignments, "after a step:")


@pytest.mark.parametrize("layout", layouts(4, 8), ids=str)
def test_a_training_step_equals_that_of_one_process(layout: MeshRules) -> None:
    variants = list(VARIANTS)[: 2 if layout.world_size == 4 else 1]
    for name in variants:
        step_of_one_process(VARIANTS[name])

    def check() -> None:
        for name in variants:
            try:
                check_step(VARIANTS[name], layout)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error

    run_ranks(check, layout.world_size)
