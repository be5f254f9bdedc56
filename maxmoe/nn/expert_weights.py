"""Weights of routed experts as one value, and experts whose weights come from other processes."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from torch import Tensor

from maxmoe.ops import LowRankFactors, RaggedPlan
from maxmoe.quantization import QuantizedStack


class ExpertWeights(NamedTuple):
    """Weights of L experts, as `maxmoe.ops.expert_ffn` takes them.

    Attributes:
        gate: ``(L, D, F)``, gate projections, or None. This and the next two may be quantized.
        up: ``(L, D, F)``, up projections.
        down: ``(L, F, D)``, down projections.
        gate_bias: ``(L, F)``, or None.
        up_bias: ``(L, F)``, or None.
        down_bias: ``(L, D)``, or None.
        gate_factors: low-rank factors beside `gate`, or None.
        up_factors: low-rank factors beside `up`, or None.
        down_factors: low-rank factors beside `down`, or None.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate_factors: LowRankFactors | None
    up_factors: LowRankFactors | None
    down_factors: LowRankFactors | None

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
        def of_tensor(weight: Tensor) -> Tensor:
            return weight.map(function) if isinstance(weight, QuantizedStack) else function(weight)

        def of_weight(weight: Tensor | LowRankFactors | None) -> Tensor | LowRankFactors | None:
            if isinstance(weight, LowRankFactors):
                return weight._replace(a=function(weight.a), b=function(weight.b))
            return None if weight is None else of_tensor(weight)

        return ExpertWeights(*map(of_weight, self))  # type: ignore[arg-type]


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
