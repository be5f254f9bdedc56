"""Compares random sequences of operations on a parallelized model with the same sequence in one process.

A sequence is one preset on a mesh and up to eight operations: backwards of one or two forwards, steps of an optimizer,
clipping, evaluations, loading of the state, and forwards and backwards that an exception or a KeyboardInterrupt ends.
In one process nothing is interrupted; an interrupted backward is followed by `zero_grad`, because it has added to the
gradients. Norms, logits of evaluations, and in the end all parameters and gradients must equal one process's. A
case is several sequences on the same ranks.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from maxmoe.parallel import clip_grad_norm_, parallelize, token_sharding
from maxmoe.sharding import Mesh
from support.parallel_decoder import LocalSGD, MeshRules, batch, decoder, layouts, loss
from support.parts import assert_same
from support.run_ranks import run_ranks

LAYOUTS = [*layouts(2, 4), MeshRules("ep-as-dp", {"data": 2, "fsdp": 2})]
OPTIONS: list[dict[str, Any]] = [
    {"recompute": parts} for parts in ((), ("blocks",), ("experts",), ("attention", "experts", "dispatch"))
]
PLACES = (
    "embedding",
    "blocks.0.attention",
    "blocks.0.feed_forward",
    "blocks.1.feed_forward.router",
    "blocks.1",
    "norm",
)
ERRORS = (ArithmeticError, KeyboardInterrupt)
MAX_OPERATIONS = 8
TOLERANCE = 1e-10


class Operation(NamedTuple):
    """An operation, its batch, and where and how it is interrupted."""

    name: str
    number: int
    place: str
    error: type[BaseException]


class Run:
    """A model on the tokens of one rank, or on all of them in one process."""

    def __init__(self, model: nn.Module, part: Any) -> None:
        self.model, self.part = model, part
        self.found: list[Tensor] = []

    def loss(self, number: int) -> Tensor:
        tokens, targets = (whole.roll(number, 1)[self.part] for whole in batch())
        return loss(self.model(tokens), targets)

    def backward(self, operation: Operation) -> None:
        self.loss(operation.number).backward()

    def two_backwards(self, operation: Operation) -> None:
        first, second = self.loss(operation.number), self.loss(operation.number + 1)
        (first if operation.number % 2 else second).backward()
        (second if operation.number % 2 else first).backward()

    def step(self, _operation: Operation) -> None:
        if self.has_gradients():
            LocalSGD(self.model).step()
            self.model.zero_grad()

    def clip(self, _operation: Operation) -> None:
        if self.has_gradients():
            self.found.append(clip_grad_norm_(self.model.parameters(), 0.5))

    @torch.no_grad()
    def evaluate(self, operation: Operation) -> None:
        self.model.eval()
        self.found.append(self.model(batch()[0].roll(operation.number, 1)[self.part]).logits)
        self.model.train()

    def load(self, _operation: Operation) -> None:
        state = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    def has_gradients(self) -> bool:
        return all(parameter.grad is not None for parameter in self.model.parameters())

    def interrupt_forward(self, operation: Operation) -> None:
        self._interrupt(operation, lambda _output: self._stop(operation))

    def interrupt_backward(self, operation: Operation) -> None:
        def add_hook(output: Any) -> None:
            (output if isinstance(output, Tensor) else output[0]).register_hook(lambda _: self._stop(operation))

        self._interrupt(operation, add_hook)
        self.model.zero_grad()

    def _stop(self, operation: Operation) -> None:
        raise operation.error("stopped")

    def _interrupt(self, operation: Operation, act: Callable[[Any], None]) -> None:
        place, before = self.model.get_submodule(operation.place), dict(self.model.named_parameters())
        handle = place.register_forward_hook(lambda _module, _arguments, output: act(output))
        try:
            self.loss(operation.number).backward()
        except BaseException as error:
            if str(error) != "stopped":
                raise
        else:
            raise AssertionError(f"{operation} was not interrupted")
        finally:
            handle.remove()
        after = dict(self.model.named_parameters())
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in before), operation


NAMES = ("backward", "two_backwards", "step", "clip", "evaluate", "load", "interrupt_forward", "interrupt_backward")


def draw(random: Random) -> list[Operation]:
    """Draw operations, backwards and interruptions more often than others; the last one leaves gradients."""
    weights = (3, 2, 3, 1, 2, 1, 4, 4)
    operations = [
        Operation(name, random.randrange(4), random.choice(PLACES), random.choice(ERRORS))
        for name in random.choices(NAMES, weights, k=random.randint(2, MAX_OPERATIONS - 1))
    ]
    return [*operations, Operation("backward", random.randrange(4), PLACES[0], ERRORS[0])]


def in_one_process(operations: list[Operation]) -> tuple[list[Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Norms and logits, and the parameters and gradients in the end."""
    run = Run(decoder(), ...)
    for operation in operations:
        if operation.name == "interrupt_backward":
            run.model.zero_grad()
        elif operation.name != "interrupt_forward":
            getattr(run, operation.name)(operation)
    return run.found, {name: (value.detach(), value.grad) for name, value in run.model.named_parameters()}


def on_ranks(layout: MeshRules, options: dict[str, Any], operations: list[Operation], expected: Any) -> None:
    """Compare with `in_one_process`; options of `parallelize`."""
    mesh = Mesh(layout.sizes)
    model = parallelize(decoder(), mesh, layout.rules, **options)
    run = Run(model, token_sharding(mesh, layout.rules).slices(batch()[0].shape))
    for operation in operations:
        getattr(run, operation.name)(operation)
    found, parameters = expected
    for index, value in enumerate(found):
        of_rank = value[run.part] if value.dim() else value  # logits, or a norm
        assert_same(run.found[index].double(), of_rank.double(), f"number {index}", tolerance=TOLERANCE)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.grad is not None, name
        for kind, got, want in zip(("value", "gradient"), (parameter, parameter.grad), parameters[name], strict=True):
            assert_same(got.full_tensor(), want, f"{kind} of {name}", tolerance=TOLERANCE)  # type: ignore[attr-defined]


def one_case(random: Random, cases: int = 8) -> Counter[str]:
    """Several sequences on the same ranks, each with its own preset."""
    num_ranks = random.choice([2, 2, 4])
    drawn = []
    for _ in range(cases):
        layout = random.choice([layout for layout in LAYOUTS if layout.world_size == num_ranks])
        drawn.append((layout, random.choice(OPTIONS), draw(random)))
    expected = [in_one_process(operations) for _, _, operations in drawn]

    def check() -> None:
        for (layout, options, operations), wanted in zip(drawn, expected, strict=True):
            try:
                on_ranks(layout, options, operations, wanted)
            except Exception as error:
                texts = [f"{each.name} {each.number} {each.place} {each.error.__name__}" for each in operations]
                raise AssertionError(f"{layout}, {options}, {texts}: {error}") from error

    run_ranks(check, num_ranks)
    return Counter(operation.name for _, _, operations in drawn for operation in operations)
