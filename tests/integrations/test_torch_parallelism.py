"""DDP and FSDP2 of PyTorch on models with MoE layers, and a checkpoint of 2 ranks in 1 process, against one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from maxmoe import MoEConfig, MoEFeedForward, StatsAccumulator
from support.run_ranks import run_ranks

STEPS, RANKS = 3, 2
# The mean over ranks of a load balance loss per sequence is the loss of all sequences; this does not hold per batch.
CONFIG = MoEConfig(
    hidden_size=6,
    intermediate_size=5,
    num_experts=4,
    top_k=2,
    num_shared_experts=1,
    load_balance_loss_weight=0.1,
    load_balance_scope="sequence",
    score_function="sigmoid",
    score_correction_bias=True,
    correction_bias_update_rate=0.1,
)
BATCHES = torch.randn(STEPS, 4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.RMSNorm(6, dtype=torch.float64), MoEFeedForward(CONFIG, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Residual(), Residual())


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, num_ranks: int = 1) -> Any:
    """Train on this rank's sequences; return losses, statistics and biases over all ranks."""
    accumulator = StatsAccumulator(model)
    losses = []
    for batch in BATCHES:
        loss = model(batch.chunk(num_ranks)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if num_ranks > 1:
        dist.all_reduce(total)
    step = accumulator.update()
    counts = {name: stats.tokens_per_expert for name, stats in step.layers.items()}
    assert list(counts) == ["0.moe", "1.moe"]
    return total / num_ranks, step.aux_loss, counts, [bias.clone() for bias in model.buffers()]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fsdp2])
def test_ranks_train_as_one_process(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    def on_rank() -> Any:
        model = wrap(make_model())
        optimizer = adamw(model)
        values = train(model, optimizer, dist.get_rank(), RANKS)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
        return values

    whole = make_model()
    optimizer = adamw(whole)
    expected = train(whole, optimizer)
    assert all(bias.any() for bias in whole.buffers())
    for got in run_ranks(on_rank, RANKS):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    # One process resumes from the checkpoint of two.
    model = make_model()
    loaded = adamw(model)
    model_state, optimizer_state = get_state_dict(model, loaded)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(model, loaded, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.testing.assert_close(train(model, loaded), train(whole, optimizer), rtol=1e-12, atol=1e-12)
