"""The interface of contenders, and the check of their results."""

import copy
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from benchmarks.problem import Problem
from benchmarks.results import Case
from benchmarks.timing import Runner

Mode = Literal["forward+backward", "forward", "forward, weights changed"]

# The largest relative error |a - b| / |b| between two contenders, which sum in different orders.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def mode_of(case: Case) -> Mode:
    """The modes of a case of experts."""
    return next(mode for mode in get_args(Mode) if mode == case.mode)


class Contender:
    """An implementation that computes a problem.

    The benchmark calls `available`, then `prepare` once, then `forward` or `step` repeatedly.

    Attributes:
        name: name in tables and figures.
        kind: "maxmoe", "alternative", "part" of a layer, or "bound".
        settle_seconds: pause after its turn, for threads that spin on.
        weight_copies: number of copies of the weights that it holds, beside the weights of the problem.
        gradient_copies: peak memory for the gradients of the weights, in sizes of the weights.
    """

    name: str
    kind = "alternative"
    settle_seconds = 0.0
    weight_copies = 1
    gradient_copies = 1

    def available(self, problem: Problem, mode: Mode) -> str | None:
        """Why it cannot be timed, None if it can."""
        return None

    def prepare(self, problem: Problem) -> None:
        """Convert the weights to its layout, or take the problem's."""
        raise NotImplementedError

    def parameters(self) -> Sequence[Tensor]:
        """The weights as an optimizer would change them."""
        raise NotImplementedError

    def repack(self) -> None:
        """Update its state after a change of the weights; timed."""

    def forward(self) -> Tensor:
        """The output ``(T, D)``, without saving tensors for a backward pass."""
        raise NotImplementedError

    def step(self) -> tuple[Tensor, Sequence[Tensor]]:
        """The output, and the gradients of x, of the routing weights and of all parameters, in its own layout."""
        raise NotImplementedError

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """The gradients of a step, by the names and in the shapes of `Problem`."""
        raise NotImplementedError

    def results(self, mode: Mode) -> dict[str, Tensor]:
        """Output and gradients by name."""
        if mode != "forward+backward":
            return {"output": self.forward()}
        output, gradients = self.step()
        return {"output": output, **self.in_layout_of_problem(gradients)}


class AutogradContender(Contender):
    """A contender that PyTorch differentiates."""

    leaves: dict[str, Tensor]
    cotangent: Tensor

    def compute(self) -> Tensor:
        """The output, from the leaves."""
        raise NotImplementedError

    def set_leaves(self, problem: Problem, **leaves: Tensor) -> None:
        """Set the leaves: x, the weights of the routing, the parameters; the memory is shared."""
        self.leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        self.cotangent = problem.cotangent

    def parameters(self) -> Sequence[Tensor]:
        """All leaves except the inputs."""
        return [leaf for name, leaf in self.leaves.items() if name not in ("x", "weights")]

    def forward(self) -> Tensor:
        """See `Contender`."""
        with torch.no_grad():
            return self.compute()

    def step(self) -> tuple[Tensor, Sequence[Tensor]]:
        """See `Contender`."""
        output = self.compute()
        return output, torch.autograd.grad(output, list(self.leaves.values()), self.cotangent)

    def in_layout_of_problem(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients of the leaves, by the names of the problem."""
        return dict(zip(self.leaves, gradients, strict=True))


def runner(contender: Contender, mode: Mode) -> Runner:
    """Return a runner that times the contender.

    In training the optimizer changes the weights before every step, so they are changed here, too: results that a
    contender caches from the weights become invalid. The change is not timed, but `repack` is.
    """
    trains, changes = mode == "forward+backward", mode != "forward"

    def call() -> object:
        if changes:
            contender.repack()
        return contender.step() if trains else contender.forward()

    return Runner(
        contender.name,
        call,
        contender.kind,
        before=(lambda: change_in_place(contender.parameters())) if changes else None,
        settle_seconds=contender.settle_seconds,
    )


def runner_by_turns(contender: Contender, problem: Problem, mode: Mode) -> Runner:
    """Return a runner of a contender that is prepared when its turn begins and freed when it ends; neither is timed.

    The first call of a turn is not timed either, because the system has to map its memory.
    """
    turn: list[Runner] = []

    def before() -> None:
        if turn[0].before is not None:
            turn[0].before()

    def begin() -> None:
        prepared = copy.copy(contender)
        prepared.prepare(problem)
        turn.append(runner(prepared, mode))
        before()
        turn[0].call()

    return Runner(
        contender.name,
        lambda: turn[0].call(),
        contender.kind,
        before,
        settle_seconds=contender.settle_seconds,
        begin_turn=begin,
        end_turn=turn.clear,
    )


@torch.no_grad()
def change_in_place(parameters: Sequence[Tensor]) -> None:
    """Write every value, as an optimizer does, without changing it."""
    for parameter in parameters:
        parameter.mul_(1)


def disagreement(results: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> str | None:
    """Describe a difference above the tolerance; None if there is none."""
    for name, value in expected.items():
        theirs, ours = results[name].detach().double(), value.detach().double()
        error = float((theirs - ours).norm() / ours.norm().clamp_min(1e-30))
        if not error <= tolerance:
            return f"wrong {name}: relative error {error:.1e}"
    return None
