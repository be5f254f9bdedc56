"""Sums of gradients: reduce-scattered first, then the shards are summed, together for each block."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maxmoe.models import Decoder
from maxmoe.parallel import parallelize
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.sharding import LogicalRules, Mesh
from support.counted_collectives import CountedCollectives
from support.measured_step import measured_steps
from support.parallel_decoder import CONFIG, MeshRules
from support.parts import assert_same
from support.run_ranks import run_cases, run_ranks

pytestmark = [
    pytest.mark.usefixtures("collectives_are_not_compared"),
    pytest.mark.filterwarnings("ignore:.*of the parameters are whole on every rank"),
]


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
