"""Single experts stay frozen by the hook that docs/how_to/surgery.md shows, in every kind of training."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import maxmoe
from maxmoe.sharding import Mesh
from support.run_ranks import run_cases

PAGE = Path(__file__).parents[2] / "docs/how_to/surgery.md"
BATCHES = torch.randn(3, 4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return model


def expert_parallel(model: nn.Module) -> nn.Module:
    return maxmoe.parallelize(model, Mesh({"expert": 2}), "ep-as-dp")


def fully_sharded(model: nn.Module) -> nn.Module:
    return maxmoe.parallelize(model, Mesh({"fsdp": 2}), "pure-fsdp")


def trained(wrap: Any, rank: int, num_ranks: int) -> list[torch.Tensor]:
    """The experts of the first layer before and after training, of which expert 1 is frozen."""
    (block,) = re.findall(r"^def freeze.*?(?=^layer)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    page: dict[str, Any] = {}
    exec("import torch\nfrom torch.distributed.tensor import DTensor, Replicate\n" + block, page)
    torch.manual_seed(0)
    config = maxmoe.MoEConfig(hidden_size=6, intermediate_size=5, num_experts=4, top_k=2)
    model = nn.Sequential(*(maxmoe.MoEFeedForward(config, dtype=torch.float64) for _ in range(2)))
    before = model[0].experts.up_proj.detach().clone()
    wrapped = wrap(model)
    for parameter in model[0].experts.parameters():
        page["freeze"](parameter, [1])
    # Without eps the scale of gradients does not matter: DDP averages them over ranks, maxmoe sums them.
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-2, eps=1e-20)
    for batch in BATCHES:
        optimizer.zero_grad()
        wrapped(batch.chunk(num_ranks)[rank]).square().mean().backward()
        optimizer.step()
    after = model[0].experts.up_proj.detach()
    return [before, after.full_tensor() if isinstance(after, DTensor) else after]


def test_frozen_experts_keep_their_bits_and_the_others_are_those_of_one_process() -> None:
    _, expected = trained(lambda model: model, 0, 1)

    def check(wrap: Any) -> None:
        before, after = trained(wrap, dist.get_rank(), 2)
        assert torch.equal(after[1], before[1])
        assert not any(torch.equal(after[expert], before[expert]) for expert in (0, 2, 3))
        torch.testing.assert_close(after, expected, rtol=1e-7, atol=1e-10)

    run_cases(check, 2, [(ddp,), (fsdp2,), (expert_parallel,), (fully_sharded,)])
