"""Measures the speeds of the machine at hand."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe._torch import all_gather_single
from maxmoe.config import MoEConfig
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.nn import MoE
from maxmoe.parallel import parallelize
from maxmoe.planning import predict
from maxmoe.planning.device import Device, Link
from maxmoe.ranks.rank_processes import RankProcesses
from maxmoe.sharding import Mesh

ROWS = (4, 16, 64, 256, 1024)
CHANNELS = (8, 16, 32, 64)
WIDTH, DEPTH, EXPERTS = 512, 512, 4
BATCH, HEADS, LENGTH = 16, 8, 128  # sizes of attention
BLOCKS = (2, 6)  # few and many, of small decoders whose difference is the time of a block
SMALL, LARGE = 2**10, 2**21  # bytes of the messages that show latency and bandwidth
REPEATS = 7


def calibrate(name: str, *, num_ranks: int = 2) -> Device:
    """Measure products, attention, memory, collectives and the overhead of blocks, and return them as a device.

    Each rank is a process with one thread that shares the cores of this machine; collectives run through gloo.

    Args:
        name: name of the device.
        num_ranks: number of processes that measure the collectives; two at least.

    Returns:
        The device, with all ranks on one node.

    Raises:
        ImportError: without tqdm, which the extra `examples` installs.
        RuntimeError: if other load makes the measurements useless.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    measurements: dict[str, Callable[[], Any]] = {
        "products": _products,
        "attention": _attention,
        "memory": _memory_bandwidth,
        "layer": _block_overhead,
        "collectives": partial(_collectives, max(2, num_ranks)),
        "sharded blocks": partial(_seconds_per_block, _measured_seconds),
    }
    found: dict[str, Any] = {}
    for what, measure in (bar := tqdm(measurements.items(), dynamic_ncols=True)):
        bar.set_description(f"measuring {what}")
        found[what] = measure()
    peaks, half_rows = found["products"]
    attention_share, half_channels = _shares_of_attention(found["attention"], peaks["float32"])
    latency, bandwidth = found["collectives"]
    link = Link(latency, bandwidth)
    device = Device(
        name=name,
        sources=(
            f"measured by python -m maxmoe plan --calibrate, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
        ),
        peak_flops=peaks,
        max_share=1.0,
        half_rows=half_rows,
        attention_share=attention_share,
        half_channels=half_channels,
        memory=_memory(),
        memory_bandwidth=found["memory"],
        ranks_per_node=0,
        intra_node=link,
        inter_node=link,
        overlap=0.0,
        cores=len(os.sched_getaffinity(0)),
        block_overhead=found["layer"],
    )
    # The overhead does not include the collectives of a block, which the planner counts.
    waiting = _seconds_per_block(partial(_predicted_seconds, replace(device, block_overhead=0.0)))
    return replace(device, sharded_block_overhead=max(0.0, found["sharded blocks"] - waiting))


def _memory() -> int:
    """Return the bytes of the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def seconds(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of a call, after one that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return median(times)


def seconds_in_turn(functions: Mapping[int, Callable[[], object]]) -> dict[int, float]:
    """Return the shortest time of a call of each function, called in turn, so that other load slows all of them."""
    times: dict[int, list[float]] = {key: [] for key in functions}
    for _ in range(REPEATS + 1):
        for key, function in functions.items():
            begin = time.perf_counter()
            function()
            times[key].append(time.perf_counter() - begin)
    return {key: min(of_function[1:]) for key, of_function in times.items()}  # the first call is not counted


def _slope(what: str, slope: float) -> float:
    """Return the time that one more element takes; raises if the measurements say that it takes none."""
    if slope <= 0:
        raise RuntimeError(f"larger {what} took no longer than smaller ones: calibrate when this machine is less busy")
    return slope


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as ranks that share cores do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _products() -> tuple[dict[str, float], float]:
    """Return the peak by dtype, and the number of rows with half of it in float32: a fit of time = a + b * rows."""
    peaks = {}
    half_rows = 0.0
    with _one_thread():
        for dtype in (torch.float32, torch.bfloat16):
            matrix = torch.randn(WIDTH, DEPTH).to(dtype)
            times = {rows: seconds(partial(torch.matmul, torch.randn(rows, WIDTH).to(dtype), matrix)) for rows in ROWS}
            per_row = _slope("products", (times[ROWS[-1]] - times[ROWS[1]]) / (ROWS[-1] - ROWS[1]))
            peaks[str(dtype).removeprefix("torch.")] = 2 * WIDTH * DEPTH / per_row
            if dtype is torch.float32:
                half_rows = max(0.0, times[ROWS[1]] / per_row - ROWS[1])
    return peaks, half_rows


def _attention() -> dict[int, float]:
    """Return the time of a forward and a backward of causal attention in float32, by the channels of a head."""

    def step(query: Tensor, key: Tensor, value: Tensor) -> None:
        torch.autograd.backward(F.scaled_dot_product_attention(query, key, value, is_causal=True).sum())

    with _one_thread():
        inputs = {channels: torch.randn(3, BATCH, HEADS, LENGTH, channels, requires_grad=True) for channels in CHANNELS}
        return seconds_in_turn({channels: partial(step, *tensors) for channels, tensors in inputs.items()})


def _shares_of_attention(times: dict[int, float], peak: float) -> tuple[float, float]:
    """Return `attention_share` and `half_channels`: a fit of time = a + b * channels with least relative errors."""
    inverse = 1 / torch.tensor(list(times.values()), dtype=torch.float64)
    channels = torch.tensor(list(times), dtype=torch.float64)
    table = torch.stack([inverse, channels * inverse], 1)
    start, slope = torch.linalg.lstsq(table, torch.ones_like(inverse)[:, None]).solution[:, 0].tolist()
    slope = _slope("heads of attention", slope)
    flops_per_channel = 3 * 2 * BATCH * HEADS * LENGTH**2
    return min(1.0, flops_per_channel / (slope * peak)), max(0.0, start / slope)


def _memory_bandwidth() -> float:
    """Return the bytes per second that one thread reads and writes in an addition of tensors larger than caches."""
    with _one_thread():
        x = torch.randn(2**24)
        return 3 * x.nbytes / seconds(partial(torch.add, x, x, out=torch.empty_like(x)))


def _block_overhead() -> float:
    """Return the time of a forward and a backward of a small layer and a norm on few tokens."""
    config = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=EXPERTS, top_k=2, num_shared_experts=1)
    with _one_thread():
        layer, norm, linear = MoE(config), nn.RMSNorm(16), nn.Linear(16, 16)
        x = torch.randn(1, 4, 16, requires_grad=True)

        def step() -> None:
            hidden: Tensor = x + linear(linear(linear(linear(norm(x)))))
            (hidden + layer(norm(hidden)).hidden_states).sum().backward()

        return seconds(step)


def _slowdown(num_ranks: int) -> float:
    """Return by how much ranks with one thread each slow each other down, because they share the cores."""
    return max(1.0, num_ranks / len(os.sched_getaffinity(0)))


def _small_decoder(num_layers: int, device: str = "cpu") -> Decoder:
    moe = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=EXPERTS, top_k=2)
    config = DecoderConfig(vocab_size=16, hidden_size=16, num_layers=num_layers, num_heads=2, moe=moe)
    return Decoder(config, device=device)


def _seconds_per_block(seconds_of_layers: Callable[[Sequence[int]], list[float]]) -> float:
    """Return the time per block, from the times of a step with few and with many blocks."""
    few, many = seconds_of_layers(BLOCKS)
    return (many - few) / (BLOCKS[1] - BLOCKS[0])


def _predicted_seconds(device: Device, nums_layers: Sequence[int]) -> list[float]:
    """Return the predicted time of a step of small decoders on two ranks."""
    step: dict[str, Any] = {"batch_size": 2, "sequence_length": 4}
    models = [_small_decoder(num_layers, "meta") for num_layers in nums_layers]
    return [predict(model, Mesh.planned({"fsdp": 2}), "pure-fsdp", device, **step).seconds for model in models]


def _measured_seconds(nums_layers: Sequence[int]) -> list[float]:
    """Return the time of a step of small decoders on two ranks, if each had a core."""
    of_ranks = RankProcesses(deadline=300.0).run(_steps_of_two_ranks, 2, nums_layers, 2 * REPEATS)
    return [max(times) / _slowdown(2) for times in zip(*of_ranks, strict=True)]


def _steps_of_two_ranks(nums_layers: Sequence[int], repeats: int) -> list[float]:
    """Return the time of a step of small decoders on this rank."""
    torch.set_num_threads(1)
    return [_step_of_two_ranks(num_layers, repeats) for num_layers in nums_layers]


def _step_of_two_ranks(num_layers: int, repeats: int) -> float:
    """Return the time of a step of a small decoder, whose parameters are sharded over the ranks."""
    model = parallelize(_small_decoder(num_layers), Mesh({"fsdp": 2}), "pure-fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, 4, dtype=torch.long)

    def step() -> None:
        output = model(tokens)
        torch.autograd.backward(output.logits.sum() + output.aux_loss)
        optimizer.step()
        optimizer.zero_grad()

    return seconds(step, repeats)


def _collectives(num_ranks: int) -> tuple[float, float]:
    """Return latency and bandwidth of a step of a ring: the all-gathers of a small and a large tensor."""
    small, large = RankProcesses(deadline=300.0).run(_all_gathers, num_ranks, 7 * REPEATS)[0]
    steps, slowdown = num_ranks - 1, _slowdown(num_ranks)
    bandwidth = steps * (LARGE - SMALL) / max(large - small, 1e-9)
    return max(0.0, small / steps / slowdown), bandwidth * slowdown


def _all_gathers(repeats: int) -> tuple[float, float]:
    """Return the times by which all-gathers of a small and a large tensor make products longer.

    In a step a collective follows computation: its ranks come one after another, and threads have to wake up.
    """
    torch.set_num_threads(1)
    rows, matrix = torch.randn(ROWS[-2], WIDTH), torch.randn(WIDTH, DEPTH)
    alone = seconds(lambda: torch.matmul(rows, matrix), repeats)
    times = []
    for size in (SMALL, LARGE):
        mine = torch.zeros(size // 4)
        gathered = torch.zeros(dist.get_world_size() * size // 4)

        def step(mine: Tensor = mine, gathered: Tensor = gathered) -> None:
            all_gather_single(gathered, mine)
            torch.matmul(rows, matrix)

        times.append(seconds(step, repeats) - alone)
    return times[0], times[1]
