"""After an exception in a forward or backward the model is unchanged, or the error of its next call names the fix."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe.parallel import RankError, clip_grad_norm_, parallelize, token_sharding
from maxmoe.sharding import Mesh
from support.parallel_decoder import LocalSGD, MeshRules, batch, decoder, loss
from support.parts import assert_same
from support.run_ranks import check_at_once, run_cases, run_ranks
from support.slow_cases import by_default

ERRORS = (ArithmeticError, KeyboardInterrupt)

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


class Operation(NamedTuple):
    """A method of `Run`, and where and how it is interrupted."""

    name: str
    place: str
    error: type[BaseException]


class Run:
    """A model on the tokens of one rank, or on all of them in one process, where nothing is interrupted."""

    def __init__(self, model: nn.Module, part: Any) -> None:
        self.model, self.part = model, part
        self.norms: list[Tensor] = []

    def backward(self, _operation: Operation) -> None:
        tokens, targets = (whole[self.part] for whole in batch())
        loss(self.model(tokens), targets).backward()

    def step(self, _operation: Operation) -> None:
        LocalSGD(self.model).step()
        self.model.zero_grad()

    def clip(self, _operation: Operation) -> None:
        self.norms.append(clip_grad_norm_(self.model.parameters(), 0.5))

    def interrupt_forward(self, operation: Operation) -> None:
        self._interrupt(operation, lambda _output: self._stop(operation))

    def interrupt_backward(self, operation: Operation) -> None:
        def add_hook(output: Any) -> None:
            (output if isinstance(output, Tensor) else output[0]).register_hook(lambda _: self._stop(operation))

        self._interrupt(operation, add_hook)
        self.model.zero_grad()  # it has added to the gradients

    def _stop(self, operation: Operation) -> None:
        raise operation.error("stopped")

    def _interrupt(self, operation: Operation, act: Callable[[Any], None]) -> None:
        place, before = self.model.get_submodule(operation.place), dict(self.model.named_parameters())
        handle = place.register_forward_hook(lambda _module, _arguments, output: act(output))
        with pytest.raises(operation.error, match=r"^stopped$"):
            self.backward(operation)
        handle.remove()
        after = dict(self.model.named_parameters())
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in before), operation


@functools.cache
def in_one_process(*names: str) -> Run:
    run, anywhere = Run(decoder(), ...), Operation("", PLACES[0], ERRORS[0])
    for name in names:
        if name == "interrupt_backward":
            run.model.zero_grad()
        elif name != "interrupt_forward":
            getattr(run, name)(anywhere)
    return run


def on_ranks(layout: MeshRules, options: dict[str, Any], operations: list[Operation]) -> None:
    """Compare norms, and the parameters and gradients in the end, with one process."""
    expected, mesh = in_one_process(*(operation.name for operation in operations)), Mesh(layout.sizes)
    model: Any = parallelize(decoder(), mesh, layout.rules, **options)
    run = Run(model, token_sharding(mesh, layout.rules).slices(batch()[0].shape))
    for operation in operations:
        getattr(run, operation.name)(operation)
    for norm, other in zip(run.norms, expected.norms, strict=True):
        assert_same(norm.double(), other.double(), "norm", tolerance=1e-10)
    for (name, parameter), of_one in zip(model.named_parameters(), expected.model.parameters(), strict=True):
        assert_same(parameter.full_tensor(), of_one.detach(), name, tolerance=1e-10)
        assert_same(parameter.grad.full_tensor(), of_one.grad, f"gradient of {name}", tolerance=1e-10)


def interrupted(number: int) -> list[Operation]:
    """Interruptions in turn between whole steps; every place has both errors in some case."""

    def operation(name: str, index: int = 0) -> Operation:
        return Operation(name, PLACES[index], ERRORS[(number + index) % 2])

    return [
        operation("backward"),
        *(operation("interrupt_forward", index) for index in range(len(PLACES))),  # gradients stay, and are added to
        *map(operation, ("backward", "clip", "step")),
        *(operation("interrupt_backward", index) for index in range(len(PLACES) - 1)),
        operation("backward"),
    ]


@pytest.mark.parametrize("world_size", by_default([2, 4], [2]))
def test_an_interruption_leaves_nothing_behind(world_size: int) -> None:
    cases = [(*case, interrupted(number)) for number, case in enumerate(CASES) if case[0].world_size == world_size]
    run_cases(on_ranks, world_size, cases)


def test_one_rank_that_goes_on_alone_is_an_error() -> None:
    """Collectives of its next call would be matched with other collectives of the other ranks."""

    def stop(*_arguments: object) -> None:
        raise ArithmeticError

    def train(layout: MeshRules) -> None:
        mesh = Mesh(layout.sizes, timeout=timedelta(seconds=4))
        model = parallelize(decoder(), mesh, layout.rules)
        part = token_sharding(mesh, layout.rules).slices(batch()[0].shape)
        tokens, targets = (whole[part] for whole in batch())
        loss(model(tokens), targets).backward()
        if dist.get_rank() == 1:
            handle = model.get_submodule("blocks.1.feed_forward").register_forward_hook(stop)
            with pytest.raises(ArithmeticError):
                model(tokens)
            handle.remove()
        loss(model(tokens), targets).backward()

    expected = (
        r"rank 1 was interrupted by an exception in the forward of call 2, after \d+ modules and \d+ collectives of "
        r"Decoder, and rank 0 .*End all ranks, and resume from a checkpoint"
    )

    def check(layout: MeshRules) -> None:
        with pytest.raises(RankError, match=expected):
            run_ranks(train, 2, layout)

    check_at_once(check, [(EXPERT,), (FSDP,)])
