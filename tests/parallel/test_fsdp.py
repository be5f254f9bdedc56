"""The parameters that FSDP2 shards, and that using FSDP2 changes nothing but the schedule."""

import dataclasses
import sys

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from maxmoe.models import Decoder
from maxmoe.parallel import parallelize
from maxmoe.parallel.plan.fsdp_units import blocks
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.sharding import LogicalRules, Mesh
from support import small_decoder
from support.run_ranks import run_ranks

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


def test_blocks_are_the_children_of_outermost_lists() -> None:
    model = decoder()
    model.blocks[0].inner = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    assert list(blocks(model)) == list(model.blocks)


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


def gradients(model: Decoder, rules: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Parallelize a model, and return the gradients of one step on the tokens of this rank."""
    mesh = Mesh(sizes)
    parallelize(model, mesh, rules)
    torch.manual_seed(mesh.rank or 0)
    output = model(torch.randint(8, (2, 5)))
    (output.logits.square().sum() + output.aux_loss).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.sampled(2)
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
def test_gradients_are_those_without_fsdp(
    rules: str, sizes: dict[str, int], units: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare() -> list[str]:
        model = decoder()
        with_fsdp = gradients(model, rules, sizes)
        found = [name for name, child in model.named_modules() if isinstance(child, FSDPModule)]
        monkeypatch.setattr(sys.modules["maxmoe.parallel.plan.planner"], "fsdp_axes", lambda *_: ())
        for name, expected in gradients(decoder(), rules, sizes).items():
            torch.testing.assert_close(with_fsdp[name], expected, rtol=1e-12, atol=1e-14, msg=f"{name}: {{}}".format)
        return found

    for found in run_ranks(compare, Mesh.planned(sizes).num_ranks):
        assert found == units
