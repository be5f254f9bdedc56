"""A parallelized Decoder against one process: logits, losses, statistics, gradients and a step of the optimizer."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from maxmoe.models import Decoder, DecoderConfig
from maxmoe.sharding import LogicalRules, Mesh, assign, parallelize
from parallel_decoder import (
    VARIANTS,
    MeshRules,
    Step,
    batch,
    decoder,
    layouts,
    loss,
    optimizer,
    step_of_one_process,
    token_spec,
)
from parts import assert_same, part_by_definition
from run_ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:no rule for the logical name")


def check_parameters(model: Decoder, config: DecoderConfig, mesh: Mesh, rules: LogicalRules) -> None:
    """They lie where `assign` says, and have the values of the part by definition."""
    before = step_of_one_process(config).before
    parameters = dict(model.named_parameters())
    assignments = assign(decoder(config), mesh, rules)
    assert parameters.keys() == assignments.keys() == before.keys()
    for name, assignment in assignments.items():
        parameter = parameters[name]
        assert isinstance(parameter, DTensor), name
        assert parameter.shape == before[name].shape, name
        assert parameter.placements == assignment.sharding.placements, name
        assert parameter.to_local().equal(part_by_definition(before[name], assignment.sharding.spec, mesh)), name


def check_output(output, expected, spec, mesh: Mesh) -> None:
    assert_same(output.logits, part_by_definition(expected.logits, spec, mesh), "logits")
    assert_same(output.aux_loss, expected.aux_loss, "aux_loss")
    assert len(output.stats) == len(expected.stats)
    for stats, expected_stats in zip(output.stats, expected.stats, strict=True):
        assert stats.tokens_per_expert.equal(expected_stats.tokens_per_expert)
        assert stats.dropped.equal(expected_stats.dropped)
        assert_same(stats.router_entropy, expected_stats.router_entropy, "router_entropy")


def check_gradients(model: Decoder, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.grad.placements == parameter.placements, name
        assert_same(parameter.grad.full_tensor(), expected[name], f"gradient of {name}")


def check_step(config: DecoderConfig, layout: MeshRules) -> None:
    expected: Step = step_of_one_process(config)
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    model = parallelize(decoder(config), mesh, rules)
    assert isinstance(model, Decoder)
    check_parameters(model, config, mesh, rules)

    spec = token_spec(mesh, rules)
    tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
    with torch.no_grad():
        check_output(model(tokens), expected.output, spec, mesh)
    descent = optimizer(model)
    output = model(tokens)
    loss(output, targets).backward()
    check_output(output, expected.output, spec, mesh)
    check_gradients(model, expected.gradients)
    descent.step()
    for name, parameter in model.named_parameters():
        assert_same(parameter.detach().full_tensor(), expected.after[name], f"{name} after the step")


@pytest.mark.parametrize("layout", layouts(4, 8), ids=str)
def test_a_training_step_equals_that_of_one_process(layout: MeshRules) -> None:
    variants = list(VARIANTS)[: 3 if layout.world_size == 4 else 1]
    for name in variants:
        step_of_one_process(VARIANTS[name])

    def check() -> None:
        for name in variants:
            try:
                check_step(VARIANTS[name], layout)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error

    run_ranks(check, layout.world_size)
