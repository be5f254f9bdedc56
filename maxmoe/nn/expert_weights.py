"""Weights of routed experts as one value, and experts whose weights come from other processes."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from torch import Tensor

from maxmoe.ops import Projection, RaggedPlan


class ExpertWeights(NamedTuple):
    """Weights of L experts, in the order of the arguments of `maxmoe.ops.expert_ffn`.

    Attributes:
        gate: ``(L, D, F)``, or None.
        up: ``(L, D, F)``; with a fused gate ``(L, D, 2F)``.
        down: ``(L, F, D)``.
    """

    gate: Projection | None
    up: Projection
    down: Projection

    def tensors(self) -> list[Tensor]:
        """Return all tensors, whose first dim is L; of quantized weights, their codes, scales and zero points."""
        found: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self._map(collect)
        return found

    def with_tensors(self, tensors: Iterable[Tensor]) -> "ExpertWeights":
        """Return weights with other tensors, in the order of `tensors`; they may be of another number of experts."""
        remaining = iter(tensors)
        return self._map(lambda _: next(remaining))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "ExpertWeights":
        gate = None if self.gate is None else self.gate.map(function)
        return ExpertWeights(gate, self.up.map(function), self.down.map(function))


class ForeignExperts(Protocol):
    """Interface of experts of other processes, some of whose rows this process computes."""

    def compute(
        self, experts: Callable[[ExpertWeights, RaggedPlan], Tensor], own: ExpertWeights, plan: RaggedPlan
    ) -> Tensor:
        """Receive the weights of the foreign experts, and compute them after the experts of this process.

        Args:
            experts: function that computes the rows of a plan with the weights of its experts: ``(N, D)``, zero in
                other rows.
            own: weights of the experts of this process, which it sends to others.
            plan: rows that the experts of this process compute.

        Returns:
            ``(N, D)``, sum of the outputs of own and foreign experts.
        """
        ...
