"""A parallelized Decoder against one process: training steps, odd batches, frozen parameters, failures, generation."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.models import DecoderConfig
from maxmoe.models.decoder import DecoderOutput
from maxmoe.parallel import ParameterSharding, parallelize, parameter_shardings
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh, PartitionSpec
from support.parallel_decoder import (
    BLOCK,
    CONFIG,
    MOE,
    VARIANTS,
    LocalSGD,
    MeshRules,
    batch,
    decoder,
    layouts,
    loss,
    step_of_one_process,
    token_spec,
)
from support.parts import assert_same, part_by_definition
from support.run_ranks import fake_rank, run_ranks
from support.sampling import cases_by_default


def check_parts(
    found: dict[str, Tensor | None], whole: dict[str, Tensor], assignments: dict[str, ParameterSharding], what: str
) -> None:
    """Every DTensor has the sharding of `parameter_shardings`, and equals this part of one process's tensor."""
    assert found.keys() == assignments.keys() == whole.keys()
    for name, assignment in assignments.items():
        tensor, sharding = found[name], assignment.sharding
        assert isinstance(tensor, DTensor), (what, name)
        assert tensor.shape == whole[name].shape and tensor.placements == sharding.placements, (what, name)
        part = part_by_definition(whole[name], sharding.spec, sharding.mesh)
        assert_same(tensor.to_local(), part, f"{what} {name}", scale=float(whole[name].abs().max()))


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
    assignments = parameter_shardings(decoder(config), mesh, rules)
    divides = config.moe is not None and config.moe.num_experts % mesh.size("context", "expert") == 0
    model = parallelize(decoder(config), mesh, rules, dispatch="auto" if divides else "gather_weights")
    check_parts(dict(model.named_parameters()), expected.before, assignments, "parameter")

    spec = token_spec(mesh, rules)
    tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
    if layout.world_size == 4:
        with torch.no_grad():
            assert_same(model(tokens).logits, part_by_definition(expected.output.logits, spec, mesh), "evaluated")
    descent = LocalSGD(model)  # its parameters are shards, also after the evaluation
    output = model(tokens)
    loss(output, targets).backward()
    check_output(output, expected.output, spec, mesh)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    check_parts(gradients, expected.gradients, assignments, "gradient of")
    descent.step()
    check_parts(dict(model.named_parameters()), expected.after, assignments, "after a step:")


STEPS = [
    (variant, layout) for layout in layouts(4, 8) for variant in list(VARIANTS)[: None if layout.world_size == 4 else 1]
]
# Every variant; latent experts with tensor parallelism; attention and routers under rules of their own.
BY_DEFAULT = [*zip(reversed(VARIANTS), layouts(4)[1:9:2], strict=True), ("every part", layouts(4)[-1])]


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize(
    ("variant", "layout"),
    cases_by_default(STEPS, BY_DEFAULT),
    ids=str,
)
def test_a_training_step_equals_that_of_one_process(variant: str, layout: MeshRules) -> None:
    run_ranks(lambda: check_step(VARIANTS[variant], layout), layout.world_size)


FSDP_AND_EXPERT = MeshRules("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2})


STRATEGIES = pytest.mark.parametrize("dispatch", ["ring_of_experts", "ragged_all_to_all"])


@pytest.mark.sampled(1)
@STRATEGIES
@pytest.mark.parametrize("layout", [MeshRules("ep-as-cp", {"fsdp": 2, "expert": 2}), FSDP_AND_EXPERT], ids=str)
def test_every_rank_generates_what_one_process_generates(layout: MeshRules, dispatch: Dispatch) -> None:
    """Also with rules that shard sequences in training: in generation each rank has whole sequences of any length."""
    prompt = torch.arange(3).unsqueeze(0)

    def generate(model: nn.Module) -> Tensor:
        torch.manual_seed(5)
        return model.generate(prompt, 4)

    expected = generate(decoder())

    def check() -> Tensor:
        model = parallelize(decoder(), Mesh(layout.sizes), layout.rules, dispatch=dispatch)
        return generate(model.eval())

    for generated in run_ranks(check, 4):
        assert torch.equal(generated, expected)


@pytest.mark.sampled(1)
@STRATEGIES
def test_gradients_accumulate_and_frozen_parameters_have_none(dispatch: Dispatch) -> None:
    expected = step_of_one_process(BLOCK).gradients

    def check() -> None:
        mesh = Mesh(FSDP_AND_EXPERT.sizes)
        model = decoder(BLOCK)
        frozen = [name for name, _ in model.named_parameters() if "router" in name or "embedding" in name]
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        parallelize(model, mesh, FSDP_AND_EXPERT.rules, dispatch=dispatch)
        spec = token_spec(mesh, LogicalRules.load(FSDP_AND_EXPERT.rules))
        tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
        for _ in range(2):
            loss(model(tokens), targets).backward()
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (name not in frozen)
            if name in frozen:
                assert parameter.grad is None
            else:
                assert_same(parameter.grad.full_tensor(), 2 * expected[name], name)

    run_ranks(check, 4)


def test_ranks_with_few_sequences_and_with_none() -> None:
    expected = step_of_one_process(BLOCK)

    def check() -> None:
        model, sizes = parallelize(decoder(BLOCK), Mesh({"fsdp": 4}), "pure-fsdp"), (0, 1, 7, 0)
        tokens, targets = (whole.split(sizes)[dist.get_rank()] for whole in batch())
        output = model(tokens)
        loss(output, targets).backward()
        assert_same(output.logits, expected.output.logits.split(sizes)[dist.get_rank()])
        assert_same(output.aux_loss, expected.output.aux_loss)
        for name, parameter in model.named_parameters():
            assert_same(parameter.grad.full_tensor(), expected.gradients[name], name)

    run_ranks(check, 4)


@pytest.mark.slow
def test_capacity_of_sequences_that_stay_whole() -> None:
    """By default dispatch/test_strategies.py tests one layer."""
    config = replace(BLOCK, moe=replace(MOE, implementation="dense", capacity_factor=1.0))
    expected = step_of_one_process(config)
    assert expected.output.stats[0].dropped > 0

    def check() -> None:
        mesh, rules = Mesh({"fsdp": 2, "expert": 2}), LogicalRules.load("ep-as-dp")
        model, spec = parallelize(decoder(config), mesh, rules), token_spec(mesh, rules)
        tokens, targets = (part_by_definition(whole, spec, mesh) for whole in batch())
        output = model(tokens)
        loss(output, targets).backward()
        assert output.stats[0].dropped.equal(expected.output.stats[0].dropped)
        for name, parameter in model.named_parameters():
            assert_same(parameter.grad.full_tensor(), expected.gradients[name], name)

    run_ranks(check, 4)


def test_capacity_of_sequences_that_are_cut_is_refused() -> None:
    config = replace(CONFIG, moe=replace(MOE, implementation="dense", capacity_factor=1.0))
    message = "blocks.1.feed_forward needs whole sequences, sharded here over ('context',): choose rules"
    with fake_rank(0, 4):
        model = decoder(config)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            parallelize(model, Mesh({"fsdp": 2, "context": 2}), "default")
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("rules", ["default", "pure-fsdp", "ep-tp"])
def test_one_rank_computes_what_one_process_does(rules: str) -> None:
    expected, (tokens, targets) = step_of_one_process(CONFIG), batch()
    with fake_rank(0, 1):
        model = parallelize(decoder(), Mesh({"fsdp": 1, "expert": 1}), rules)
        output = model(tokens)
        loss(output, targets).backward()
        assert output.logits.equal(expected.output.logits) and output.aux_loss.equal(expected.output.aux_loss)
        for name, parameter in model.named_parameters():
            assert parameter.grad.to_local().equal(expected.gradients[name]), name
