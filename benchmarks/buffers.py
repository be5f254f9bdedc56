"""Memory and time of a step whose tokens select few experts: without a buffer, and with one that drops or has windows.

torchrun --nproc-per-node 4 -m benchmarks.buffers

Peak: most bytes of tensors in memory during a forward and backward of a stack of layers, on the rank with the most,
without parameters and their gradients. Time: of a step beside a step without a buffer, taken in turn, the median of the
ratios.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe import MoEConfig, MoEFeedForward, parallelize, replay_routing
from maxmoe.costs.measured import measuring
from maxmoe.nn import RoutingRecord
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh

DISPATCHES: tuple[Dispatch, ...] = ("ring_of_experts", "ragged_all_to_all", "least_loaded")
FACTOR = 1.25
BUFFERS: dict[str, dict[str, Any]] = {
    "none": {},
    "chunks": {"buffer_factor": FACTOR, "overflow": "chunks"},
    "drop": {"buffer_factor": FACTOR},
}


class Stack(nn.Sequential):
    """Layers that add to their input."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute all layers."""
        for layer in self:
            x = x + layer(x)
        return x


def main() -> None:
    """Print a row for each dispatch and imbalance."""
    options = parse()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = Mesh({"expert": dist.get_world_size()})
    x = torch.randn(1, options.tokens, options.hidden_size)
    if dist.get_rank() == 0:
        print(
            f"{'dispatch':<18} imbalance  "
            + "  ".join(f"{f'{name} MiB':>10}" for name in BUFFERS)
            + "  time chunks/none"
        )
    for dispatch in DISPATCHES:
        names = [name for name in BUFFERS if (dispatch, name) != ("least_loaded", "drop")]
        models = {name: make_model(options, mesh, dispatch, BUFFERS[name]) for name in names}
        for imbalance in imbalances(mesh.num_ranks):
            experts = routed(options, imbalance, mesh.num_ranks)
            peaks = [peak(mesh, model, x, experts) / 2**20 for model in models.values()]
            ratio = time_ratio(models["chunks"], models["none"], x, experts, options.repetitions)
            if dist.get_rank() == 0:
                cells = "  ".join(f"{each:>10.1f}" for each in peaks) + " " * 12 * (len(BUFFERS) - len(peaks))
                print(f"{dispatch:<18} {imbalance:>9.0f}  {cells}  {ratio:>16.3f}", flush=True)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 1024, "hidden-size": 256, "intermediate-size": 512, "num-experts": 16, "layers": 4}
    for name, default in {**sizes, "repetitions": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def make_model(options: argparse.Namespace, mesh: Mesh, dispatch: Dispatch, buffer: dict[str, Any]) -> Stack:
    """A stack of layers with two experts per token, whose gradients exist already."""
    torch.manual_seed(0)
    sizes = (options.hidden_size, options.intermediate_size, options.num_experts)
    names = ("hidden_size", "intermediate_size", "num_experts")
    config = MoEConfig(**dict(zip(names, sizes, strict=True)), top_k=2, **buffer)
    model = Stack(*(MoEFeedForward(config) for _ in range(options.layers)))
    parallelize(model, mesh, "ep-as-dp", dispatch=dispatch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def imbalances(num_ranks: int) -> Iterator[float]:
    """Powers of two up to the number of ranks."""
    imbalance = 1
    while imbalance <= num_ranks:
        yield imbalance
        imbalance *= 2


def routed(options: argparse.Namespace, imbalance: float, num_ranks: int) -> Tensor:
    """Expert ids of the tokens of a rank: the first expert has all rows above an even load."""
    slots = torch.arange(options.tokens * 2)
    num_hot = round(len(slots) * (imbalance - 1) / (num_ranks - 1))
    experts = torch.where(slots < num_hot, 0, slots % options.num_experts)
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(dist.get_rank()))
    return experts[order].view(1, options.tokens, 2)


def step(model: Stack, x: Tensor, experts: Tensor) -> Iterator[None]:
    """A forward, and then a backward, each to its end."""
    record = RoutingRecord({str(index): [experts] for index in range(len(model))})
    with replay_routing(model, record):
        output = model(x.clone().requires_grad_())
        yield
        output.sum().backward()
    del output
    yield


def peak(mesh: Mesh, model: Stack, x: Tensor, experts: Tensor) -> float:
    """Bytes of the rank with the most."""
    for _ in step(model, x, experts):  # the first sum of gradients makes fake tensors of their shapes
        pass
    with measuring(mesh, model) as recorder:
        halves = step(model, x, experts)
        next(halves)
        recorder.end_forward()
        next(halves)
    most = torch.tensor(max(part.peak for part in recorder.parts.values()))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def time_ratio(model: Stack, other: Stack, x: Tensor, experts: Tensor, repetitions: int) -> float:
    """Median of the ratios of the times of steps taken in turn, on the slowest rank."""
    ratios = []
    for _ in range(repetitions + 1):
        times = []
        for each in (other, model):
            dist.barrier()
            start = time.perf_counter()
            for _ in step(each, x, experts):
                pass
            dist.barrier()
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios[1:])


if __name__ == "__main__":
    main()
