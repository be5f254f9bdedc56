"""Memory and collectives of a training step on real ranks, for comparison with a plan."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from maxmoe import MoE, replay_routing
from maxmoe.costs import Traffic
from maxmoe.models import DecoderConfig
from maxmoe.nn import RoutingRecord
from maxmoe.parallel import parallelize
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.parallel.plan.sharded_tokens import ShardedTokens
from maxmoe.sharding import LogicalRules, Mesh, NamedSharding
from support.counted_collectives import CountedCollectives
from support.memory import num_bytes, saved_for_backward
from support.parallel_decoder import BATCH, CONFIG, LENGTH, MeshRules, batch, decoder, layouts, loss, token_spec
from support.run_ranks import run_ranks


@dataclass(frozen=True)
class MeasuredStep:
    """Memory and collectives of a step on one rank.

    Args:
        parameters: shape and bytes of this rank's part of each parameter.
        collectives: times and bytes by kind and axis.
        kept_bytes: bytes that autograd holds after the forward, without stored parameters.
    """

    parameters: dict[str, tuple[tuple[int, ...], int]]
    collectives: dict[tuple[str, str], list[int]]
    kept_bytes: int


# Every preset once, on a mesh with the axes of the preset.
PRESET_LAYOUTS = [layout for layout in layouts(4) if "fsdp_transpose" not in layout.sizes]
_measured: dict[str, list[MeasuredStep]] = {}


def measured_steps(
    layout: MeshRules,
    config: DecoderConfig = CONFIG,
    *,
    dispatch: Dispatch = "ring_of_experts",
    num_chunks: int = 1,
    dtype: torch.dtype = torch.float64,
    make: Callable[[], Any] | None = None,
    sums_losses: bool = True,
) -> list[MeasuredStep]:
    """Measure a step with balanced routing, by rank, of a decoder or of what `make` returns; results are cached."""
    key = f"{layout} {config} {dispatch} {num_chunks} {dtype} {make} {sums_losses}"
    if key not in _measured:
        make = make or (lambda: decoder(config).to(dtype))
        _measured[key] = run_ranks(_step, layout.world_size, layout, make, dispatch, num_chunks, sums_losses)
    return _measured[key]


@contextmanager
def without_sums_of_losses() -> Iterator[None]:
    """Leave losses and statistics as they are on this rank: their sums are not counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedTokens, "_all_reduce", lambda tokens, summand, axes: summand)
        yield


def balanced_routing(model: torch.nn.Module, shape: torch.Size) -> RoutingRecord:
    """Route tokens to one expert after the other."""
    calls = {}
    for path, layer in model.named_modules():
        if isinstance(layer, MoE):
            slots = torch.arange(shape.numel() * layer.config.top_k)
            calls[path] = [(slots % layer.config.num_selectable_experts).view(*shape, layer.config.top_k)]
    return RoutingRecord(calls)


def _step(
    layout: MeshRules, make: Callable[[], Any], dispatch: Dispatch, num_chunks: int, sums_losses: bool
) -> MeasuredStep:
    mesh = Mesh(layout.sizes)
    options: Any = {"dispatch": dispatch, "num_chunks": num_chunks, "allow_unused": True}
    model: Any = parallelize(make(), mesh, layout.rules, **options)
    part = NamedSharding(mesh, token_spec(mesh, LogicalRules.load(layout.rules))).slices((BATCH, LENGTH))
    tokens, targets = (whole[part].clone() for whole in batch())
    stored = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    routing = balanced_routing(model, tokens.shape)
    sums = nullcontext() if sums_losses else without_sums_of_losses()
    with sums, replay_routing(model, routing), CountedCollectives(mesh) as counted:
        with saved_for_backward(stored.values()) as kept:
            result = loss(model(tokens), targets)
        kept_bytes = num_bytes(kept)
        result.backward()
    parameters = {name: (tuple(local.shape), local.nbytes) for name, local in stored.items()}
    return MeasuredStep(parameters, dict(counted.counts), kept_bytes)


def by_kind_and_axis(*flows: Traffic) -> dict[tuple[str, ...], list[int]]:
    total: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    for flow in flows:
        # gloo has no reduce-scatter: rows are exchanged by an all-to-all of the same number of bytes, and added up.
        of_rows = flow.purpose.startswith(("tokens to experts", "routing weights", "outputs of experts"))
        kind = "all-to-all" if of_rows and flow.kind == "reduce-scatter" else flow.kind
        total[kind, flow.axis][0] += flow.times
        total[kind, flow.axis][1] += flow.bytes
    return dict(total)
