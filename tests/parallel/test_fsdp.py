"""The parameters that FSDP2 shards, its modules, and the sums of gradients; test_parallelize.py compares gradients.

Gradients are reduce-scattered first, then the shards are summed, together for each block.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from maxmoe.models import Decoder
from maxmoe.parallel import parallelize
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.sharding import LogicalRules, Mesh
from support.counted_collectives import CountedCollectives
from support.measured_step import measured_steps
from support.parallel_decoder import CONFIG, MeshRules, batch, decoder
from support.parts import assert_same
from support.run_ranks import fake_rank, run_cases, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are whole on every rank")


def taken(rules: str | LogicalRules, **sizes: int) -> dict[str, int]:
    parameters = make_plan(decoder(), Mesh.planned(sizes), LogicalRules.load(rules)).parameters.items()
    specs = {name: planned.stored.spec for name, planned in parameters if planned.fsdp_axes}
    return {name: next(dim for dim, axes in enumerate(spec) if "fsdp" in axes) for name, spec in specs.items()}


def test_fsdp_takes_a_parameter_with_the_dim_that_its_axis_splits_last() -> None:
    found = taken("shard-exp-on-fsdp", fsdp=2, expert=2)
    # Experts: exp = [expert, fsdp]. The others: embed = [fsdp, expert], where fsdp is the major axis.
    assert set(found.values()) == {0} and all(".experts." in name for name in found)
    assert len(found) == 6  # matrices and biases
    assert taken("ep-as-dp", fsdp=2, expert=2)["blocks.0.attention.o_proj.weight"] == 0
    assert taken("ep-as-dp", fsdp=2, expert=2)["blocks.1.feed_forward.experts.up_proj"] == 1


def test_fsdp_takes_nothing_where_its_ranks_have_the_same_tokens() -> None:
    assert taken(LogicalRules.load("pure-fsdp").override([("activation_batch", None)]), fsdp=2) == {}


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


def test_the_shards_of_dense_gradients_are_summed_over_the_axes_that_replicate_them() -> None:
    """One all-reduce per block and one for the rest: of the shards that a rank keeps, not of whole gradients."""
    layout = MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2})
    plan = make_plan(Decoder(CONFIG, device="meta"), Mesh.planned(layout.sizes), LogicalRules.load(layout.rules))
    replicated = {name for name, planned in plan.parameters.items() if planned.fsdp_axes == ("expert", "fsdp")}
    assert "blocks.0.attention.q_proj.weight" in replicated
    assert "blocks.1.feed_forward.experts.up_proj" not in replicated
    for step in measured_steps(layout, sums_losses=False):
        shards = sum(num_bytes for name, (_, num_bytes) in step.parameters.items() if name in replicated)
        assert step.collectives["all-reduce", "expert"] == [CONFIG.num_layers + 1, shards]
        # The gradients of norms and other parameters that every rank has whole.
        assert step.collectives["all-reduce", "fsdp, expert"][0] == CONFIG.num_layers + 1


class Block(nn.Module):
    """Calls its first norm as it is and the second one as `call` says, and has parameters without a gradient."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.frozen, self.unused = (nn.LayerNorm(4) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x + self.call(self.second, self.first(x).tanh()))


class Model(nn.Module):
    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(call) for _ in range(2))
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.uniform_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=False)


def recomputed_by_reentering(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=True)


def test_gradients_of_a_block_are_summed_together() -> None:
    """If a part recomputes itself in a nested backward, its gradients are summed there; the numbers are equal."""
    x = torch.randn(4, 4, dtype=torch.float64)
    one = Model(plainly).double()
    for _ in range(2):
        one(x.clone().requires_grad_()).square().sum().backward()

    def check(call: Callable[..., Tensor], per_block: int) -> None:
        mesh = Mesh({"fsdp": 2, "expert": 2})
        model = parallelize(Model(call).double(), mesh, "ep-as-dp")
        assert mesh.rank is not None
        mine = x[mesh.rank : mesh.rank + 1]
        with CountedCollectives(mesh) as counted:
            for _ in range(2):
                model(mine.clone().requires_grad_()).square().sum().backward()
        assert counted.counts["all-reduce", "fsdp, expert"][0] == 2 * 2 * per_block
        for (name, parameter), expected in zip(model.named_parameters(), one.parameters(), strict=True):
            if expected.grad is None:
                assert parameter.grad is None, name
            else:
                assert_same(parameter.grad.full_tensor(), expected.grad, name)

    run_cases(check, 4, [(plainly, 1), (recomputed, 1), (recomputed_by_reentering, 2)])


def test_a_part_of_a_block_can_be_called_alone() -> None:
    one, x = Model(plainly).double(), torch.randn(2, 4, dtype=torch.float64)
    one.blocks[0].first(x).square().sum().backward()

    def check() -> None:
        mesh = Mesh({"fsdp": 2})
        model = parallelize(Model(plainly).double(), mesh, "pure-fsdp")
        model.blocks[0].first(x[mesh.rank]).square().sum().backward()
        found = model.blocks[0].first.weight.grad.full_tensor()
        assert_same(found, one.blocks[0].first.weight.grad, "weight")

    run_ranks(check, 2)
