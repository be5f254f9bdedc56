"""After an exception in a forward or backward the model is unchanged, or the error of its next call names the fix."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.parallel import RankError, clip_grad_norm_, parallelize, token_sharding
from maxmoe.sharding import Mesh
from support.parallel_decoder import CONFIG, LocalSGD, MeshRules, batch, decoder, loss
from support.parts import assert_same
from support.run_ranks import check_at_once, run_cases, run_ranks
from support.slow_cases import by_default

EXPERT, FSDP = MeshRules("ep-as-dp", {"expert": 2}), MeshRules("pure-fsdp", {"fsdp": 2})
# Hooks of FSDP2 beside experts, of replicas, of sequences, of parts of weights and of tokens that all ranks hold.
FOUR_RANKS = [
    MeshRules("ep-as-dp", {"fsdp": 2, "expert": 2}),
    MeshRules("ep-as-dp", {"data": 2, "fsdp": 2}),
    MeshRules("cp-as-ep", {"context": 2, "expert": 2}),
    MeshRules("default", {"fsdp": 2, "tensor": 2}),
    MeshRules("ep-tp", {"data": 2, "expert": 2}),
]
CASES: list[tuple[MeshRules, dict[str, Any]]] = [
    (EXPERT, {}),
    (FSDP, {}),
    (EXPERT, {"recompute": ("blocks",)}),
    (FSDP, {"recompute": ("blocks",)}),
    (EXPERT, {"dispatch": "gather_weights"}),
    *((layout, {}) for layout in FOUR_RANKS),
]
# Where a call is interrupted: the first and the last unit, and between them in attention, router and experts.
PLACES = ("embedding", "blocks.0.attention.o_proj", "blocks.1.feed_forward.router", "blocks.1.feed_forward", "output")
LARGE = 1e9  # a maximum norm above all norms


class StopError(Exception):
    """The exception of a script, such as for a batch that it cannot read."""


def without_interruption() -> tuple[float, dict[str, Tensor]]:
    """One process: the norm of the first gradients, and the gradients after a step."""
    model, (tokens, targets) = decoder(), batch()
    loss(model(tokens), targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)
    LocalSGD(model).step()
    model.zero_grad()
    loss(model(tokens), targets).backward()
    return float(norm), {name: parameter.grad for name, parameter in model.named_parameters()}


def parallel(
    layout: MeshRules, timeout: timedelta = timedelta(minutes=1), **options: Any
) -> tuple[nn.Module, Tensor, Tensor]:
    mesh = Mesh(layout.sizes, timeout=timeout)
    model = parallelize(decoder(CONFIG), mesh, layout.rules, **options)
    part = token_sharding(mesh, layout.rules).slices(batch()[0].shape)
    return model, *(whole[part] for whole in batch())


Interrupt = Callable[[nn.Module, str, type[BaseException], Callable[[], Tensor]], None]


def interrupt_forward(model: nn.Module, place: str, error: type[BaseException], compute: Callable[[], Tensor]) -> None:
    def stop(*_arguments: Any) -> None:
        raise error(place)

    handle = model.get_submodule(place).register_forward_hook(stop)
    with pytest.raises(error, match=place):
        compute()
    handle.remove()


def interrupt_backward(model: nn.Module, place: str, error: type[BaseException], compute: Callable[[], Tensor]) -> None:
    def stop(_gradient: Tensor) -> None:
        raise error(place)

    def add_hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
        (output if isinstance(output, Tensor) else output[0]).register_hook(stop)

    handle = model.get_submodule(place).register_forward_hook(add_hook)
    value = compute()
    handle.remove()
    with pytest.raises(error, match=place):
        value.backward()


def check_interruptions(
    expected: tuple[float, dict[str, Tensor]],
    number: int,
    layout: MeshRules,
    options: dict[str, Any],
    interrupt: Interrupt,
) -> None:
    """Gradients of an earlier micro-batch stay; their norm, the optimizer and the next step are right.

    The interruptions of one model follow each other. After the last one there is a whole step.
    """
    norm, gradients = expected
    places = PLACES if interrupt is interrupt_forward else PLACES[:-1]
    errors: list[type[BaseException]] = [StopError, KeyboardInterrupt]  # in turn: every place has both in some case
    model, tokens, targets = parallel(layout, **options)
    before = dict(model.named_parameters())
    loss(model(tokens), targets).backward()
    if interrupt is interrupt_backward:  # it has added to the gradients, as in one process
        LocalSGD(model).step()
    for index, place in enumerate(places):
        interrupt(model, place, errors[(number + index) % 2], lambda: loss(model(tokens), targets))
        now = dict(model.named_parameters())
        assert now.keys() == before.keys()
        assert all(now[name] is before[name] and isinstance(now[name], DTensor) for name in now), place
    if interrupt is interrupt_forward:
        assert float(clip_grad_norm_(model.parameters(), LARGE)) == pytest.approx(norm, rel=1e-12)
        LocalSGD(model).step()
    model.zero_grad()
    loss(model(tokens), targets).backward()
    for name, parameter in model.named_parameters():
        assert_same(parameter.grad.full_tensor(), gradients[name], name)


@pytest.mark.parametrize("world_size", by_default([2, 4], [2]))
def test_an_interruption_leaves_nothing_behind(world_size: int) -> None:
    cases = [(number, *case) for number, case in enumerate(CASES) if case[0].world_size == world_size]
    with_place = [(*case, interrupt) for case in cases for interrupt in (interrupt_forward, interrupt_backward)]
    run_cases(functools.partial(check_interruptions, without_interruption()), world_size, with_place)


def test_one_rank_that_goes_on_alone_is_an_error() -> None:
    """Collectives of its next call would be matched with other collectives of the other ranks."""

    def train(layout: MeshRules) -> None:
        model, tokens, targets = parallel(layout, timeout=timedelta(seconds=4))
        loss(model(tokens), targets).backward()
        if dist.get_rank() == 1:
            interrupt_forward(model, "blocks.1.feed_forward", StopError, lambda: model(tokens))
        loss(model(tokens), targets).backward()

    expected = (
        r"rank 1 was interrupted by an exception in the forward of call 2, after \d+ modules and \d+ collectives of "
        r"Decoder, and rank 0 .*End all ranks, and resume from a checkpoint"
    )

    def check(layout: MeshRules) -> None:
        with pytest.raises(RankError, match=expected):
            run_ranks(train, 2, layout)

    check_at_once(check, [(EXPERT,), (FSDP,)])
