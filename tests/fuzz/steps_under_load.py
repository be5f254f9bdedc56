"""Many training steps on a mesh while other processes keep the processors busy: no collective waits for another rank.

The threads of gloo get less time than the others, so that they hold the outputs of collectives for longer, on one rank
and not on another. Whatever such a difference decides shows itself as a hang, which ends with the stacks of all ranks::

    python tests/fuzz/steps_under_load.py --steps 20000 --cases lines
    python tests/fuzz/steps_under_load.py --steps 5000 --ranks 2 4 --busy 4

`lines` is a model as docs/sharding.md shows it, the other cases are the presets of rules.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import trange

sys.path.insert(0, str(Path(__file__).parents[1]))

from maxmoe.parallel import Declaration, parallelize, token_sharding
from maxmoe.ranks.rank_processes import RankProcesses
from maxmoe.sharding import Mesh
from support.parallel_decoder import MeshRules, batch, decoder, layouts, loss

NICENESS = 5  # added to the threads of gloo
SEED = 7


class DeclaredLinear(nn.Linear):
    """Linear layer that declares its names, as docs/sharding.md shows."""

    declaration = Declaration(logical_names={"weight": ("mlp", "embed"), "bias": ("mlp",)})


def lines(num_ranks: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model of a user, with parameters that autograd saves and others that it does not."""
    model = nn.Sequential(DeclaredLinear(8, 8), nn.Tanh(), DeclaredLinear(8, 8)).double()
    parallelize(model, Mesh({"tensor": num_ranks}), allow_unused=True)
    return model, torch.randn(4, 8, dtype=torch.float64), torch.zeros(())


def preset(layout: MeshRules) -> tuple[nn.Module, Tensor, Tensor]:
    """The decoder of the tests under a preset of rules."""
    mesh = Mesh(layout.sizes)
    model = parallelize(decoder(), mesh, layout.rules)
    tokens, targets = batch()
    part = token_sharding(mesh, layout.rules).slices(tokens.shape)
    return model, tokens[part], targets[part]


def cases(num_ranks: int) -> dict[str, MeshRules | None]:
    """The presets on meshes of a number of ranks, and the lines."""
    return {"lines": None} | {str(layout): layout for layout in layouts(num_ranks) if layout.world_size == num_ranks}


def train(layout: MeshRules | None, num_ranks: int, num_steps: int) -> None:
    """Run steps on one rank."""
    torch.manual_seed(SEED)
    model, inputs, targets = lines(num_ranks) if layout is None else preset(layout)
    slow_down_other_threads()
    for _ in trange(num_steps, disable=dist.get_rank() > 0):
        step(model, inputs, targets).backward()
        model.zero_grad()


def step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a batch."""
    output = model(inputs)
    return output.square().mean() if isinstance(output, Tensor) else loss(output, targets)


def slow_down_other_threads() -> None:
    """Give less time to all threads of this process but the one that calls."""
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.get_native_id():
            os.setpriority(os.PRIO_PROCESS, int(thread), NICENESS)


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Processes that compute for ever."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="training steps of each case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], choices=[2, 4])
    parser.add_argument("--cases", nargs="+", help="names of cases; all by default")
    parser.add_argument("--busy", type=int, default=4, help="processes that compute for ever beside the ranks")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds of a case, after which it is hung")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the cases; one that hangs is an error with the stacks of all ranks."""
    arguments = parse_arguments()
    with busy_processes(arguments.busy):
        for num_ranks in arguments.ranks:
            for name in arguments.cases or cases(num_ranks):
                ranks = RankProcesses(timeout=arguments.deadline, deadline=arguments.deadline)
                ranks.run(train, num_ranks, cases(num_ranks)[name], num_ranks, arguments.steps)
                print(f"{name} on {num_ranks} ranks: {arguments.steps} steps", flush=True)


if __name__ == "__main__":
    main()
