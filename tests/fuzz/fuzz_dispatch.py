"""Compares steps of random layers on random meshes with one process's.

A case is one mesh with some steps. Strategies, chunks, configs, dtypes, loads, padding, numbers of sequences on every
rank, replayed routing and activation checkpointing are drawn for each. Outputs, losses, statistics and all gradients
must equal one process's. With a bounded buffer, whose drops depend on the ranks, only tokens are counted. The last
step is taken again and again: no process group and no tensor may be left. A rank that hangs is reported.
"""

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from fuzz import fuzz_layers
from maxmoe import MoE, MoEConfig
from maxmoe.parallel import parallelize, parameter_shardings, token_sharding
from maxmoe.parallel.dispatch import ExpertLayout, Strategy, least_loaded
from maxmoe.parallel.plan.dispatch_plan import STRATEGIES
from maxmoe.sharding import LogicalRules, Mesh
from support.dispatched_layer import Batch, Outcome, check_part, make_layer, take_step
from support.run_ranks import run_ranks

DTYPES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}
RULES = {
    **{name: LogicalRules.load(name) for name in ("default", "ep-as-dp", "ep-as-cp", "cp-as-ep", "ep-tp", "pure-fsdp")},
    **{name: LogicalRules.load(name) for name in ("pipeline-large-moe", "shard-exp-on-fsdp")},
    # Tokens travel over `expert`; over `context` all ranks hold the same ones.
    "cp-as-ep, replicated over context": LogicalRules.load("cp-as-ep").override([("activation_length", [])]),
}
AXES = ("data", "fsdp", "fsdp_transpose", "context", "tensor", "expert")


@dataclass(frozen=True)
class Step:
    """A step, the results of one process, and the tokens of each rank if the rules do not define them."""

    config: MoEConfig
    batch: Batch
    expected: Outcome
    options: dict[str, Any]
    tolerance: float
    checkpointing: str
    sizes: tuple[int, ...] | None


def draw_mesh(random: Random, rules: LogicalRules, ranks: Sequence[int]) -> dict[str, int]:
    """Draw axes that the rules have, in any order; `expert` more often than others."""
    axes = [axis for axis in AXES if any(axis in of_rule for _, of_rule in rules)]
    num_ranks, sizes = random.choice(ranks), {}
    random.shuffle(axes)
    if "expert" in axes and random.random() < 0.7:
        axes.sort(key="expert".__ne__)
    for axis in axes:
        left = num_ranks // math.prod(sizes.values())
        if left > 1:
            sizes[axis] = random.choice([size for size in (2, 4, 8) if size <= left])
    if math.prod(sizes.values()) != num_ranks:
        return draw_mesh(random, rules, ranks)
    order = list(sizes)
    random.shuffle(order)
    return {axis: sizes[axis] for axis in order}


def draw_config(random: Random, num_parts: int, needs_sparse: bool) -> MoEConfig:
    """Draw until the experts are divisible, and no division by nearly zero amplifies rounding."""
    while True:
        config = fuzz_layers.draw_config(random)
        if config.router == "random" or config.router_rule.takes_state:
            config = replace(config, router="learned")
        if config.num_experts % num_parts or (config.score_function, config.normalization) == ("identity", "sum"):
            continue
        return replace(config, implementation="sparse", capacity_factor=None) if needs_sparse else config


def is_supported(strategy: type[Strategy], config: MoEConfig) -> bool:
    try:
        strategy.check(ExpertLayout(config=config, mesh=Mesh.planned({})))
    except ValueError:
        return False
    return strategy.keeps_sequences or config.capacity_factor is None


def draw_options(random: Random, config: MoEConfig) -> dict[str, Any]:
    has_capacity = config.capacity_factor is not None
    strategies = [name for name, strategy in STRATEGIES.items() if is_supported(strategy, config)]
    strategies += [] if has_capacity else ["auto"]
    return {"dispatch": random.choice(strategies), "num_chunks": 1 if has_capacity else random.choice([1, 1, 2, 3, 7])}


def draw_experts(random: Random, config: MoEConfig, shape: tuple[int, int]) -> Tensor | None:
    """Draw the experts of each token: the router's, any, few of them, or none; no expert twice per token."""
    kind, top_k, num_experts = (
        random.choice(["router", "router", "any", "few", "none"]),
        config.top_k,
        config.num_selectable_experts,
    )
    if kind == "router":
        return None
    scores = torch.rand(*shape, num_experts)
    if kind == "few":
        scores[..., random.randrange(num_experts)] += 1
        experts = scores.argsort(-1, descending=True)[..., :top_k]
        return experts.masked_fill(torch.arange(top_k) > 0, -1)
    experts = scores.argsort(-1)[..., :top_k]
    return experts.masked_fill(torch.rand(experts.shape) < (1.0 if kind == "none" else 0.1), -1)


def draw_step(random: Random, mesh: Mesh, rules: LogicalRules) -> Step:
    batch_axes, length_axes = token_sharding(mesh, rules).spec
    num_parts = math.lcm(*(mesh.size(*axes) for name, axes in rules if name in ("exp", "activation_exp")))
    config = draw_config(random, num_parts, needs_sparse=bool(length_axes))
    sizes, num_sequences = None, mesh.size(*batch_axes) * random.choice([0, 1, 1, 2])
    if mesh.size(*batch_axes) == mesh.num_ranks and random.random() < 0.6:
        sizes = tuple(random.choice([0, 1, 1, 2, 5]) for _ in range(mesh.num_ranks))
        num_sequences = sum(sizes)
    shape = num_sequences, mesh.size(*length_axes) * random.choice([0, 1, 1, 2, 3])
    dtype = random.choice([*DTYPES, torch.float64, torch.float64])
    x, cotangent = torch.randn(2, *shape, config.hidden_size, dtype=torch.float64).to(dtype)
    mask = torch.rand(shape) < random.choice([0.0, 0.7, 0.7]) if random.random() < 0.3 else None
    batch = Batch(x, cotangent, draw_experts(random, config, shape), mask)
    expected = take_step(make_layer(config, dtype), batch)
    options, checkpointing = draw_options(random, config), random.choice(["no", "no", "all", "keep_routing"])
    return Step(config, batch, expected, options, DTYPES[dtype], checkpointing, sizes)


def forward_of(layer: MoE, checkpointing: str) -> Callable[..., Any]:
    if checkpointing == "no":
        return layer
    if checkpointing == "all":
        return partial(checkpoint, layer, use_reentrant=False)
    return partial(checkpoint, layer, use_reentrant=False, context_fn=maxmoe.keep_routing)


def run_step(step: Step, mesh: Mesh, rules: LogicalRules, repetitions: int) -> None:
    """Compare this rank's part of a step; repeat it, and check that no memory is left."""
    least_loaded.FLOP_PER_BYTE = dict.fromkeys(least_loaded.FLOP_PER_BYTE, 0)  # sends weights for a few rows
    layer = make_layer(step.config, step.batch.x.dtype)
    shardings = parameter_shardings(layer, mesh, rules, allow_unused=True)
    parallelize(layer, mesh, rules, allow_unused=True, **step.options)
    if step.sizes is None:
        part = token_sharding(mesh, rules).slices(step.batch.x.shape[:2])
    else:
        first = sum(step.sizes[: dist.get_rank()])
        part = (slice(first, first + step.sizes[dist.get_rank()]),)
    batch, forward = step.batch.part(part), forward_of(layer, step.checkpointing)
    got = take_step(layer, batch, forward)
    if step.config.buffer_factor is None:
        # Terms of this size cancel in the gradient of weights that are scaled to sum one.
        terms = 0.01 * max(fuzz_layers.largest(gradient) for gradient in step.expected.gradients.values())
        check_part(got, step.expected, part, shardings, step.tolerance, terms)
    else:
        assert got.hidden_states.isfinite().all() and got.stats.dropped <= step.expected.stats.tokens_per_expert.sum()
        assert got.stats.tokens_per_expert.equal(step.expected.stats.tokens_per_expert)
    left = [remains(layer, batch, forward) for _ in range(repetitions)]
    assert not left or any(before >= after for before, after in pairwise(left)), (
        f"process groups, tensors and their bytes after each repetition: {left}"
    )


def remains(layer: MoE, batch: Batch, forward: Callable[..., Any]) -> tuple[int, int, int]:
    """Take a step; return the number of process groups, the number of tensors, and the bytes of the tensors."""
    take_step(layer, batch, forward)
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of modules whose classes are read from gc's objects
        tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return len(dist.distributed_c10d._world.pg_map), len(tensors), sum(map(Tensor.numel, tensors))


def one_case(random: Random, steps: int = 10, ranks: Sequence[int] = (2, 4, 4, 4, 8)) -> str:
    """Run the steps of one mesh, and name its rules."""
    torch.manual_seed(random.getrandbits(60))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "no rule for the logical name")
    name = random.choice(list(RULES))
    rules = RULES[name]
    sizes = draw_mesh(random, rules, ranks)
    drawn = [draw_step(random, Mesh.planned(sizes), rules) for _ in range(steps)]

    def check() -> None:
        mesh = Mesh(sizes)
        for index, step in enumerate(drawn):
            try:
                run_step(step, mesh, rules, repetitions=4 if index == steps - 1 else 0)
            except Exception as error:
                what = f"{step.config} {step.options} {step.batch.x.dtype} {tuple(step.batch.x.shape)} {step.sizes}"
                raise AssertionError(f"{what} checkpointing {step.checkpointing}: {error}") from error

    try:
        run_ranks(check, math.prod(sizes.values()), timeout=30.0)
    except RuntimeError as error:
        raise RuntimeError(f"{name} on {sizes}: {str(error)[-3000:]}") from error
    return name
