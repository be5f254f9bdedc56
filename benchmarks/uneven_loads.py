"""A step of a layer whose tokens select few experts: least-loaded experts beside a ragged all-to-all, on several ranks.

torchrun --nproc-per-node 4 -m benchmarks.uneven_loads
"""

import argparse
import statistics
import time
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe import MoE, MoEConfig, parallelize, replay_routing
from maxmoe.nn import RoutingRecord
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import Mesh

SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)  # share of slots of the first expert; the other slots are even


def main() -> None:
    """Time all strategies in turn, for each load."""
    options = parse()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = Mesh({"expert": dist.get_world_size()})
    layers = {dispatch: make_layer(options, mesh, dispatch) for dispatch in options.dispatch}
    x = torch.randn(1, options.tokens, options.hidden_size, requires_grad=True)
    if dist.get_rank() == 0:
        print("share of one expert  most/mean  " + "  ".join(f"{name:>24}" for name in layers), flush=True)
    for share in SHARES:
        experts = routed(options, share)
        times: dict[str, list[float]] = {name: [] for name in layers}
        for _ in range(options.repetitions + 1):
            for name, layer in layers.items():
                times[name].append(step(layer, x, experts))
        if dist.get_rank() == 0:
            cells = (f"{statistics.median(found[1:]):>12.0f} ({min(found[1:]):.0f}) ms" for found in times.values())
            print(
                f"{share:<19.0%}  {most_over_mean(experts, options):>9.2f}  " + "  ".join(map("{:>24}".format, cells))
            )
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 1024, "hidden-size": 512, "intermediate-size": 1024, "num-experts": 16, "repetitions": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--dispatch", nargs="+", choices=get_args(Dispatch), default=["ragged_all_to_all", "least_loaded"]
    )
    return parser.parse_args()


def make_layer(options: argparse.Namespace, mesh: Mesh, dispatch: Dispatch) -> MoE:
    """A layer with two experts per token."""
    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_experts=options.num_experts,
        top_k=2,
    )
    layer = MoE(config)
    parallelize(layer, mesh, "ep-as-dp", dispatch=dispatch)
    return layer


def routed(options: argparse.Namespace, share: float) -> Tensor:
    """Expert ids of the tokens of a rank, in random order."""
    slots = torch.arange(options.tokens * 2)
    num_hot = round(share * len(slots))
    experts = torch.where(slots < num_hot, 0, slots % options.num_experts)
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(dist.get_rank()))
    return experts[order].view(1, options.tokens, 2)


def most_over_mean(experts: Tensor, options: argparse.Namespace) -> float:
    """Largest number of rows of a rank over the mean; all ranks route equal numbers of slots to each expert."""
    of_experts = torch.bincount(experts.flatten(), minlength=options.num_experts)
    of_ranks = of_experts.view(dist.get_world_size(), -1).sum(1).double()
    return float(of_ranks.max() / of_ranks.mean())


def step(layer: MoE, x: Tensor, experts: Tensor) -> float:
    """Milliseconds of a forward and backward on the slowest rank."""
    layer.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    with replay_routing(layer, RoutingRecord({"": [experts]})):
        layer(x).hidden_states.sum().backward()
    dist.barrier()
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
