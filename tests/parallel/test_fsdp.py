"""The parameters that FSDP2 shards, and its modules; test_parallelize.py compares gradients."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from maxmoe.models import Decoder
from maxmoe.parallel import Declaration, parallelize
from maxmoe.parallel.plan.fsdp_units import blocks, fsdp_units
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.sharding import LogicalRules, Mesh
from support import small_decoder
from support.run_ranks import fake_rank, run_ranks

takes_larger_meshes = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason="FSDP2 of torch 2.11 takes no parameters on larger meshes: all is gathered without it",
)
SIZES = {"num_experts": 4, "hidden_size": 8, "intermediate_size": 8}


def decoder(num_layers: int = 3) -> Decoder:
    """The small decoder in sizes that the ranks can share."""
    torch.manual_seed(0)
    moe = dataclasses.replace(small_decoder.MOE, **SIZES)
    return small_decoder.make(hidden_size=8, vocab_size=8, intermediate_size=8, moe=moe, num_layers=num_layers)


def taken(rules: str | LogicalRules, **sizes: int) -> dict[str, int]:
    mesh, module = Mesh.planned(sizes), decoder()
    table = LogicalRules.load(rules)
    parameters = make_plan(module, mesh, table).parameters.items()
    specs = {name: planned.stored.spec for name, planned in parameters if planned.fsdp_axes}
    return {name: next(dim for dim, axes in enumerate(spec) if "fsdp" in axes) for name, spec in specs.items()}


@takes_larger_meshes
def test_fsdp_takes_a_parameter_with_the_dim_that_its_axis_splits_last() -> None:
    found = taken("shard-exp-on-fsdp", fsdp=2, expert=2)
    # Experts: exp = [expert, fsdp]. The others: embed = [fsdp, expert], where fsdp is the major axis.
    assert set(found.values()) == {0} and all(".experts." in name for name in found)
    assert len(found) == 2 * 3
    assert taken("ep-as-dp", fsdp=2, expert=2)["blocks.0.attention.o_proj.weight"] == 0
    assert taken("ep-as-dp", fsdp=2, expert=2)["blocks.1.feed_forward.experts.up_proj"] == 1


def test_fsdp_takes_nothing_where_its_ranks_have_the_same_tokens() -> None:
    assert taken(LogicalRules.load("pure-fsdp").override([("activation_batch", None)]), fsdp=2) == {}


@takes_larger_meshes
@pytest.mark.parametrize(("axis", "rules"), [("fsdp", "pure-fsdp"), ("expert", "ep-as-dp")])
def test_hooks_on_parameters_run_or_are_refused(axis: str, rules: str) -> None:
    """FSDP2 sets the gradients of its shards, and calls only hooks after it has."""

    def check() -> None:
        model = parallelize(decoder(), Mesh({axis: 2}), rules)
        weight, seen = model.blocks[1].feed_forward.experts.up_proj, []
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
        handle = weight.register_hook(torch.zeros_like)
        tokens = torch.randint(8, (2, 5))
        if axis == "fsdp":
            message = r"^blocks.1.feed_forward.experts.up_proj must have no hook, because the axis 'fsdp' shards it"
            with pytest.raises(RuntimeError, match=message):
                model(tokens)
            handle.remove()
        model(tokens).logits.square().sum().backward()
        assert len(seen) == 1 and seen[0].full_tensor().any() == (axis == "fsdp")

    run_ranks(check, 2)


@takes_larger_meshes
@pytest.mark.parametrize(
    ("rules", "sizes", "units"),
    [
        ("pure-fsdp", {"fsdp": 2}, ["", "blocks.0", "blocks.1", "blocks.2"]),
        ("ep-as-dp", {"fsdp": 2, "expert": 2}, ["", "blocks.0", "blocks.1", "blocks.2"]),
        ("ep-as-dp", {"data": 2, "fsdp": 2}, ["", "blocks.0", "blocks.1", "blocks.2"]),
        ("shard-exp-on-fsdp", {"fsdp": 2, "expert": 2}, ["blocks.1", "blocks.2"]),
    ],
)
def test_blocks_with_parameters_of_fsdp_are_its_modules(rules: str, sizes: dict[str, int], units: list[str]) -> None:
    with fake_rank(0, Mesh.planned(sizes).num_ranks):
        model = parallelize(decoder(), Mesh(sizes), rules)
        assert [name for name, child in model.named_modules() if isinstance(child, FSDPModule)] == units


class Lists(nn.Module):
    """Has parameters and modules in lists and dicts."""

    declaration = Declaration(
        logical_names={
            "matrices.0": ("embed", None),
            "blocks.0.0": ("embed", None),
            "blocks.1.block.0.weight": (None, "embed"),
            "blocks.2.0.weight": ("embed", None),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(8, 8))])
        held = nn.ParameterList([nn.Parameter(torch.randn(8, 8))])
        one, other = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.blocks = nn.ModuleList([held, nn.ModuleDict({"block": one}), other])


def test_parameters_in_lists_belong_to_the_root_module() -> None:
    lists: Any = Lists()
    assert set(fsdp_units(lists)[lists]) == {"matrices.0", "blocks.0.0"}
    assert list(blocks(lists)) == [lists.blocks[1]["block"], lists.blocks[2]]
    with fake_rank(0, 2):
        parallelize(lists, Mesh({"fsdp": 2}), "pure-fsdp", allow_unused=True)
        managed = [path for path, module in lists.named_modules() if isinstance(module, FSDPModule)]
        assert managed == ["", "blocks.1.block", "blocks.2"]


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
