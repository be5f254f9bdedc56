"""The inputs of all contenders."""

from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from benchmarks.results import Case
from benchmarks.shapes import Shape

# Difference of the logits of the first and the last expert, because the load of real routers is uneven.
SKEW = 1.5
# Length of x in the direction that causes the skew; large compared to the noise of 1 in every direction.
SKEW_LENGTH = 8.0


@dataclass(frozen=True)
class Problem:
    """Tokens, their routing, and the experts' weights.

    Attributes:
        shape: the sizes.
        x: ``(T, D)``.
        router: ``(E, D)``; its top K of x, and their softmax, are `experts` and `weights`.
        weights: ``(T, K)``, float32, values that the dtype of x holds exactly.
        experts: ``(T, K)``, int64.
        gate: ``(E, D, F)``.
        up: ``(E, D, F)``.
        down: ``(E, F, D)``.
        cotangent: ``(T, D)``, gradient of the output.
        copies: weights in other layouts, by name, as long as a contender holds them.
    """

    shape: Shape
    x: Tensor
    router: Tensor
    weights: Tensor
    experts: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    cotangent: Tensor
    copies: WeakValueDictionary[str, object] = field(default_factory=WeakValueDictionary)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors except the weights of the routing."""
        return self.x.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of gate, up and down together."""
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


def make_problem(shape: Shape, dtype: torch.dtype) -> Problem:
    """Draw a problem; the same one for the same shape."""
    generator = torch.Generator().manual_seed(0)
    T, D, F, E, K = shape

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator).mul_(scale)

    direction = torch.nn.functional.normalize(normal(D), dim=0)
    x = (normal(T, D) + SKEW_LENGTH * direction).to(dtype)
    # The logits of expert e are noise of 1 around skew[e].
    skew = torch.linspace(SKEW, 0, E)
    noise = normal(E, D, scale=D**-0.5)
    router = (noise + torch.outer(skew / SKEW_LENGTH - noise @ direction, direction)).to(dtype)
    scores, experts = (x.float() @ router.float().t()).softmax(-1).topk(K)
    return Problem(
        shape=shape,
        x=x,
        router=router,
        weights=(scores / scores.sum(-1, keepdim=True)).to(dtype).float(),
        experts=experts,
        gate=normal(E, D, F, scale=D**-0.5).to(dtype),
        up=normal(E, D, F, scale=D**-0.5).to(dtype),
        down=normal(E, F, D, scale=F**-0.5).to(dtype),
        cotangent=normal(T, D).to(dtype),
    )


def balanced(problem: Problem) -> Problem:
    """The same problem with an even load: numbers of rows per expert differ by at most one."""
    T, _, _, E, K = problem.shape
    order = torch.randperm(T, generator=torch.Generator().manual_seed(1))
    return replace(problem, experts=(torch.arange(T * K) % E).view(T, K)[order])


def problem_of(case: Case) -> Problem:
    """The problem of a case of experts."""
    assert isinstance(case.shape, Shape)
    return make_problem(case.shape, case.dtype)
