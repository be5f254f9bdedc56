"""Two layers in two threads of Python, beside the same two layers one after the other, with one thread of torch each.

    python -m benchmarks.python_threads

Operators run without the global interpreter lock, so that two threads of Python, such as the workers of a server, use
two cores. The ratio is the median over rounds in turn.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

import maxmoe
from benchmarks.shapes import TRAINING, Shape


def calls_of(shape: Shape, num_calls: int, gradients: bool) -> Callable[[], None]:
    """Return a function that calls a layer of its own some times."""
    tokens, D, F, E, K = shape
    layer = maxmoe.MoE(maxmoe.MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=K))
    x = torch.randn(1, tokens, D)

    def call() -> None:
        with torch.set_grad_enabled(gradients):
            for _ in range(num_calls):
                hidden_states = layer(x).hidden_states
                if gradients:
                    hidden_states.sum().backward()

    return call


def ratio(shape: Shape, num_calls: int, gradients: bool, rounds: int) -> float:
    """Return the time one after the other over the time at once: 1 with one core or with the lock, 2 at best."""
    first, second = (calls_of(shape, num_calls, gradients) for _ in range(2))
    ratios = []
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda call: call(), (first, second)))
        for _ in range(rounds):
            start = time.perf_counter()
            first()
            second()
            middle = time.perf_counter()
            list(pool.map(lambda call: call(), (first, second)))
            ratios.append((middle - start) / (time.perf_counter() - middle))
    return statistics.median(ratios)


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, shape, num_calls in (
        ("one token of B", TRAINING["B"]._replace(num_tokens=1), 100),
        ("small", TRAINING["small"], 4),
        ("B", TRAINING["B"], 1),
    ):
        for gradients in (False, True):
            kind = "forward+backward" if gradients else "forward"
            print(f"{name}, {kind}: {ratio(shape, num_calls, gradients, options.rounds):.2f}", flush=True)


if __name__ == "__main__":
    main()
