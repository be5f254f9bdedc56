"""The parameters that FSDP2 shards, and its modules; test_parallelize.py compares gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from maxmoe.parallel import Declaration, parallelize
from maxmoe.parallel.plan.fsdp_units import fsdp_units
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import batch, decoder
from support.run_ranks import fake_rank, run_cases

takes_larger_meshes = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason="FSDP2 of torch 2.11 takes no parameters on larger meshes: all is gathered without it",
)


def taken(rules: str | LogicalRules, **sizes: int) -> dict[str, int]:
    parameters = make_plan(decoder(), Mesh.planned(sizes), LogicalRules.load(rules)).parameters.items()
    specs = {name: planned.stored.spec for name, planned in parameters if planned.fsdp_axes}
    return {name: next(dim for dim, axes in enumerate(spec) if "fsdp" in axes) for name, spec in specs.items()}


@takes_larger_meshes
def test_fsdp_takes_a_parameter_with_the_dim_that_its_axis_splits_last() -> None:
    found = taken("shard-exp-on-fsdp", fsdp=2, expert=2)
    # Experts: exp = [expert, fsdp]. The others: embed = [fsdp, expert], where fsdp is the major axis.
    assert set(found.values()) == {0} and all(".experts." in name for name in found)
    assert len(found) == 6  # matrices and biases
    assert taken("ep-as-dp", fsdp=2, expert=2)["blocks.0.attention.o_proj.weight"] == 0
    assert taken("ep-as-dp", fsdp=2, expert=2)["blocks.1.feed_forward.experts.up_proj"] == 1


def test_fsdp_takes_nothing_where_its_ranks_have_the_same_tokens() -> None:
    assert taken(LogicalRules.load("pure-fsdp").override([("activation_batch", None)]), fsdp=2) == {}


@takes_larger_meshes
def test_hooks_on_parameters_run_or_are_refused() -> None:
    """FSDP2 sets the gradients of its shards, and calls only hooks after it has."""

    def check(axis: str, rules: str) -> None:
        model = parallelize(decoder(), Mesh({axis: 2}), rules)
        weight, seen = model.blocks[1].feed_forward.experts.up_proj, []
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
        handle = weight.register_hook(torch.zeros_like)
        tokens, _ = batch()
        if axis == "fsdp":
            message = r"^blocks.1.feed_forward.experts.up_proj must have no hook, because the axis 'fsdp' shards it"
            with pytest.raises(RuntimeError, match=message):
                model(tokens)
            handle.remove()
        model(tokens).logits.square().sum().backward()
        assert len(seen) == 1 and seen[0].full_tensor().any() == (axis == "fsdp")

    run_cases(check, 2, [("fsdp", "pure-fsdp"), ("expert", "ep-as-dp")])


@takes_larger_meshes
@pytest.mark.parametrize(
    ("rules", "sizes", "units"),
    [
        ("pure-fsdp", {"fsdp": 2}, ["", "blocks.0", "blocks.1"]),
        ("ep-as-dp", {"fsdp": 2, "expert": 2}, ["", "blocks.0", "blocks.1"]),
        ("ep-as-dp", {"data": 2, "fsdp": 2}, ["", "blocks.0", "blocks.1"]),
        ("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}, ["blocks.1"]),
    ],
)
def test_blocks_with_parameters_of_fsdp_are_its_modules(rules: str, sizes: dict[str, int], units: list[str]) -> None:
    with fake_rank(0, Mesh.planned(sizes).num_ranks):
        model = parallelize(decoder(), Mesh(sizes), rules)
        assert [name for name, child in model.named_modules() if isinstance(child, FSDPModule)] == units


@pytest.mark.parametrize("declared", [False, True])
def test_who_gathers(declared: bool) -> None:
    """The module that reads a parameter, or the FSDP unit around it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    if declared:
        layer.declaration = Declaration(fsdp_unit=True)  # type: ignore[assignment]
    units = fsdp_units(layer)
    attention = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    if declared:
        assert units.keys() == {layer} and {f"self_attn.{name}" for name in attention} <= units[layer].keys()
    else:
        assert units[layer.self_attn].keys() == attention and layer not in units
        assert units[layer.linear1] == {"weight": "linear1.weight", "bias": "linear1.bias"}
