"""Ways to train a decoder, in one process and on ranks alike."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoEStats, StatsAccumulator
from maxmoe.models.decoder import DecoderOutput
from maxmoe.nn import RoutingRecord
from maxmoe.parallel import GradScaler, clip_grad_norm_
from parallel.steps_on_ranks import Part, Results
from support.documented import documented
from support.parallel_decoder import MOE, LocalSGD, batch, loss


def of(output: DecoderOutput, **of_tokens: Tensor) -> Results:
    """Everything that a decoder returns."""
    stats = by_name(enumerate(output.stats))
    return Results({"logits": output.logits, **of_tokens}, {"aux_loss": output.aux_loss, **stats})


def by_name(layers: Iterable[tuple[object, MoEStats]]) -> dict[str, Tensor]:
    return {f"{name} of {layer}": tensor for layer, stats in layers for name, tensor in stats._asdict().items()}


def step(model: Any, part: Part) -> Results:
    """Forward without gradients, forward, backward, and descent."""
    tokens, targets = map(part, batch())
    with torch.no_grad():
        evaluated = model(tokens).logits
    descent = LocalSGD(model)  # its parameters are shards, also after the evaluation
    output = model(tokens)
    loss(output, targets).backward()
    descent.step()
    return of(output, evaluated=evaluated)


def padded(model: Any, part: Part) -> Results:
    """With a mask, a sequence of nothing but padding, and documents that begin anywhere."""
    generator, (tokens, targets) = torch.Generator().manual_seed(2), batch()
    mask = torch.rand(tokens.shape, generator=generator) < 0.7
    mask[2] = False
    documents = (torch.rand(tokens.shape, generator=generator) < 0.3).cumsum(1)
    output = model(part(tokens), part(mask), part(documents))
    losses = F.cross_entropy(output.logits.flatten(0, 1), part(targets).flatten(), reduction="none")
    (losses[part(mask).flatten()].sum() / mask.sum() + output.aux_loss).backward()
    return of(output)


def replayed(model: Any, part: Part) -> Results:
    """Each token goes to the experts after its own. The record of a rank has its tokens."""
    tokens, targets = map(part, batch())
    with torch.no_grad(), maxmoe.record_routing(model) as record:
        model(tokens)
    calls = {name: [(ids + 1) % MOE.num_experts for ids in each] for name, each in record.calls.items()}
    with maxmoe.replay_routing(model, RoutingRecord(calls)):
        output = model(tokens)
    loss(output, targets).backward()
    return of(output, **{f"experts of {name}": ids for name, (ids,) in record.calls.items()})


def counted(model: Any, part: Part) -> Results:
    """Two micro-batches of a step whose statistics move the correction biases."""
    accumulator, (tokens, targets) = StatsAccumulator(model), batch()
    losses = []
    for inputs in (tokens.flip(1), tokens):
        output = model(part(inputs))
        loss(output, part(targets)).backward()
        losses.append(output.aux_loss)
    found = accumulator.update()
    biases = {name: each for name, each in model.named_buffers() if name.endswith("correction_bias")}
    return Results(
        of_all={"losses": torch.stack(losses), "mean": found.aux_loss, **by_name(found.layers.items()), **biases}
    )


def with_frozen_expert(model: Any, part: Part) -> Results:
    """The hook of docs/how_to/surgery.md keeps one expert."""
    experts = {name: parameter for name, parameter in model.named_parameters() if ".experts." in name}
    for parameter in experts.values():
        documented("surgery", "freeze")(parameter, [1])
    results = step(model, part)
    for parameter in experts.values():
        whole = getattr(parameter.grad, "full_tensor", lambda parameter=parameter: parameter.grad)()
        assert [bool(expert.any()) for expert in whole] == [number != 1 for number in range(len(whole))]
    return results


def overflow(parameter: Tensor, rank: int | None = None) -> None:
    """Make the gradient infinite on one rank, or on all if `rank` is None, or there are no ranks."""
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    assert gradient is not None
    if rank is None or not dist.is_initialized() or dist.get_rank() == rank % dist.get_world_size():
        gradient.fill_(float("inf"))


def scaled(model: Any, part: Part) -> Results:
    """Six clipped steps; in three a gradient overflows: of experts on two ranks, then of the embedding."""
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    clip = clip_grad_norm_ if dist.is_initialized() else torch.nn.utils.clip_grad_norm_
    scaler: Any = (GradScaler if dist.is_initialized() else torch.amp.GradScaler)("cpu", **options)
    tokens, targets = map(part, batch())
    optimizer, scales, norms = LocalSGD(model), [], []
    embedding, *_ = model.parameters()
    experts = next(each for name, each in model.named_parameters() if name.endswith("experts.up_proj"))
    for overflowing in (None, (experts, 0), (experts, -1), (embedding, -1), None, None):
        model.zero_grad()
        scaler.scale(loss(model(tokens), targets)).backward()
        if overflowing is not None:
            overflow(*overflowing)
        scaler.unscale_(optimizer)
        norm = clip(model.parameters(), 0.3)
        norms += [norm] if overflowing is None else []
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert scales[-3:] == [(2.0**7, 0), (2.0**7, 1), (2.0**8, 0)]
    return Results(of_all={"scales": torch.tensor(scales), "norms": torch.stack(norms)})


def stepped_between(model: Any, part: Part) -> Results:
    """An optimizer steps between a forward and its backward, which does not need the values of an embedding."""
    tokens, targets = map(part, batch())
    first, second = loss(model(tokens), targets), loss(model(tokens), targets)
    first.backward()
    torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1).step()
    second.backward()
    return Results()


def two_steps(model: Any, part: Part) -> Results:
    """Two steps of AdamW. Torch ends a recomputation by an exception when it has all tensors that it needs."""
    tokens, targets = map(part, batch())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        output = checkpoint(model, tokens, use_reentrant=False)
        loss(output, targets).backward()
        optimizer.step()
    return of(output)
