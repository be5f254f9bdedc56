"""Small models in plain torch, ways to train them on several ranks, and `compare_ranks` of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from maxmoe import MoEConfig, MoEFeedForward
from maxmoe.testing import RankComparison
from maxmoe.testing.measurement import Training
from maxmoe.testing.training_runs import Run
from support.run_ranks import ByValue, rank_processes

BATCH, LENGTH, WIDTH, EXPERTS, MICRO_BATCHES = 24, 5, 8, 8, 3
# Parameters that expert parallelism leaves whole on every rank.
REPLICATED = ("first", "last", "norm", "router")
MAX_NORM = 0.01  # below the norms of all gradients
Terms = dict[str, Tensor]
Update = Callable[[], object]


class Experts(nn.Module):
    """Weighted sum of all experts; on a mesh this rank's experts compute the tokens of its expert group."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.5 * torch.randn(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(0.5 * torch.randn(EXPERTS, WIDTH, WIDTH))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.group is None:
            return self.compute(x, weights)
        count, rank = len(self.up), self.group.rank()
        x, weights = fc.all_gather_single(x, 0, self.group), fc.all_gather_single(weights, 0, self.group)
        part = self.compute(x, weights[..., rank * count : (rank + 1) * count])
        return fc.reduce_scatter_single(part, "sum", 0, self.group)

    def compute(self, x: Tensor, weights: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("bsd,edf->bsef", x, self.up))
        return torch.einsum("bsef,efd,bse->bsd", hidden, self.down, weights)

    def keep(self, mesh: DeviceMesh) -> None:
        """Keep the experts of this rank."""
        self.group = mesh.get_group()
        for name in ("up", "down"):
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(whole.chunk(mesh.size())[mesh.get_local_rank()].clone()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and an auxiliary loss that is a mean over tokens."""
        x = x + F.gelu(self.first(x))
        logits = self.router(x)
        x = x + self.experts(self.norm(x), logits.softmax(-1))
        return self.last(x), logits.logsumexp(-1).square().mean()


def build(kind: Callable[[], nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def whole_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator)
    return x, target * torch.linspace(0.5, 2, BATCH)[:, None, None]


def make_batch(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The sequences of a rank."""
    x, target = whole_batch()
    return x.chunk(num_ranks)[rank], target.chunk(num_ranks)[rank]


def same_batch(_rank: int, _num_ranks: int) -> tuple[Tensor, Tensor]:
    return whole_batch()


def other_lengths(rank: int, num_ranks: int) -> Any:
    """Rank 0 of 4 has fewer sequences: the mean over ranks is not the mean over tokens."""
    x, target = whole_batch()
    sizes = [BATCH // 8, *[(BATCH - BATCH // 8) // 3] * 3] if num_ranks == 4 else [BATCH]
    return x.split(sizes)[rank], target.split(sizes)[rank]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Terms:
    """Means over the tokens of the batch."""
    output, aux_loss = model(batch[0])
    return {"tokens": F.mse_loss(output, batch[1]), "aux": 0.1 * aux_loss}


def share_of_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Terms:
    """The share of these sequences in the mean over all tokens."""
    return {name: term * len(batch[0]) / BATCH for name, term in loss(model, batch).items()}


def scaled(terms: Terms, **factors: float) -> Terms:
    return {name: term * factors.get(name, factors.get("all", 1.0)) for name, term in terms.items()}


def backward(terms: Terms) -> Terms:
    torch.stack(list(terms.values())).sum().backward()
    return {name: term.detach() for name, term in terms.items()}


def micro_batches(batch: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.chunk(MICRO_BATCHES) for tensor in batch), strict=True))


def accumulate(
    model: Any,
    batch: tuple[Tensor, ...],
    before: Callable[[Any, bool], None] = lambda *_: None,
    loss: Callable[[Any, Any], Terms] = loss,
    **factors: float,
) -> Terms:
    """Forward and backward of all micro-batches; before(model, is_last) is called before each of them."""
    total: Terms = {}
    for number, micro_batch in enumerate(micro_batches(batch)):
        before(model, number == MICRO_BATCHES - 1)
        terms = backward(scaled(loss(model, micro_batch), **({"all": 1 / MICRO_BATCHES} | factors)))
        total = {name: term + total.get(name, 0) for name, term in terms.items()}
    return total


def reduce_gradients(model: nn.Module, group: Any = None, names: Any = "", op: Any = dist.ReduceOp.SUM) -> None:
    """All-reduce the gradients of the parameters whose names begin with `names`."""
    for name, parameter in model.named_parameters():
        if name.startswith(names) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=op, group=group)


def reduced(*names: str) -> Any:
    """A step that sums the gradients of some parameters over all ranks, and of experts over their replicas."""

    def step(model: nn.Module, batch: Any) -> Terms:
        terms = backward(share_of_loss(model, batch))
        reduce_gradients(model, names=names)
        if getattr(model, "replicas", None):
            reduce_gradients(model, model.replicas, "experts")
        return terms

    return step


def clipped(optimizer: torch.optim.Optimizer, model: nn.Module) -> Update:
    """An update that clips the gradients of a model, and clears them in the end."""

    def update() -> None:
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def alone(model: nn.Module) -> nn.Module:
    """The model is not parallelized; the step reduces the gradients."""
    return model


def expert_parallel(model: nn.Module) -> nn.Module:
    """The experts over all ranks."""
    model.experts.keep(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("expert",)))
    return model


def expert_and_data_parallel(model: nn.Module) -> nn.Module:
    """Groups of two ranks for the experts, and two replicas of each expert."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))
    model.experts.keep(mesh["expert"])
    model.replicas = mesh["replicate"].get_group()
    return model


class Case(NamedTuple):
    """Arguments of `compare_ranks`."""

    parallelize: Callable[[Any], Any]
    num_ranks: int = 4
    step: Callable[[Any, Any], Terms | None] | None = None
    loss: Callable[[Any, Any], Any] = loss
    make_batch: Callable[[int, int], Any] = make_batch
    build: Callable[[], nn.Module] = build
    make_update: Callable[[Any], Update] | None = None
    steps: int = 1


def compare(case: Case, timeout: float = 60.0, dtype: torch.dtype | None = None) -> RankComparison:
    """Call `compare_ranks`, also with functions that have no name in a module."""
    __tracebackhide__ = True  # by pytest
    functions = case.build, case.parallelize, case.make_batch, case.loss, case.step, case.make_update
    training = Training(*(function and ByValue(function) for function in functions), case.steps)  # type: ignore[call-arg]
    return Run(training, case.num_ranks, dtype, None, rank_processes(timeout, timeout)).compare()


# Models without routing, and tensor parallelism with ordinary tensors and collectives


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


build_dense = partial(build, Dense)


def dense_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class SumOfParts(torch.autograd.Function):
    """All-reduce whose result is used on every rank: its backward is the identity."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return fc.all_reduce(x, "sum", dist.group.WORLD).wait()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient


def split_features(model: Any) -> Any:
    """Keep this rank's hidden features, as ordinary parameters."""
    rank, count = dist.get_rank(), dist.get_world_size()
    for layer, name, dim in ((model.up, "weight", 0), (model.up, "bias", 0), (model.down, "weight", 1)):
        setattr(layer, name, nn.Parameter(getattr(layer, name).detach().chunk(count, dim)[rank].clone()))
    return model


def build_feed_forward(scope: Any = "batch") -> nn.Module:
    """A layer whose backward adds the gradient of its auxiliary loss."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4, "num_experts": 4, "top_k": 2}
    config = MoEConfig(**sizes, load_balance_loss_weight=0.1, load_balance_scope=scope)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), MoEFeedForward(config))
