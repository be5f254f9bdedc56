"""Weights of experts that are sent to other ranks for a step, and their gradients, which come back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from maxmoe.nn.dispatcher import Future
from maxmoe.nn.experts import ExpertWeights
from maxmoe.ops import RaggedPlan
from maxmoe.parallel.dispatch.collectives import ragged_all_to_all
from maxmoe.recompute.freed_storage import Recomputation, Rematerialized, Wait


@dataclass(frozen=True)
class LentExperts:
    """The `maxmoe.nn.ForeignExperts` of a rank: experts that other ranks lend it, and those that it lends.

    1. All-to-all: for each tensor, the weights ``(L, ...)`` of lent experts become ``(n, ...)`` of the n foreign
       experts of this rank.
    2. While they are sent, the rank computes the rows of its own experts.
    3. It computes the rows of the foreign experts.

    Between forward and backward, the foreign weights are freed; the backward sends them again. It then sends the
    gradients back while it runs the backward of the own experts. The owner adds them up in the order of the ranks. In
    a forward or backward, a rank thus holds the weights of at most n foreign experts, and their gradients.

    Args:
        plan: rows that the foreign experts compute.
        lent: experts of this rank that each rank computes, numbered from 0.
        receive: number of experts that each rank lends to this one.
    """

    plan: RaggedPlan
    lent: Sequence[Sequence[int]]
    receive: Sequence[int]
    group: dist.ProcessGroup

    def compute(
        self, experts: Callable[[ExpertWeights, RaggedPlan], Tensor], own: ExpertWeights, plan: RaggedPlan
    ) -> Tensor:
        """Compute own and foreign experts, and add up their outputs ``(N, D)``."""
        tensors = own.tensors()
        arriving = [self._send(tensor) for tensor in tensors]
        outputs = experts(own, plan)
        received = [arrive() for arrive in arriving]
        foreign = experts(own.with_tensors(received), self.plan)
        # Their storages are freed here. Before the backward of the foreign experts, all weights are sent again.
        pairs = zip(received, tensors, strict=True)
        again = [Recomputation(arrived, partial(self._send_again, tensor)) for arrived, tensor in pairs]
        Rematerialized(tensors[0], again, foreign)
        return outputs + foreign

    def _send(self, tensor: Tensor) -> Future[Tensor]:
        chosen: Tensor = _Select.apply(tensor, [expert for experts in self.lent for expert in experts])  # type: ignore[no-untyped-call]
        counts = [len(experts) for experts in self.lent]
        return ragged_all_to_all(chosen, counts, self.receive, self.group, "weights of moved experts")

    def _send_again(self, tensor: Tensor, previous: Wait) -> Wait:
        arrive = self._send(tensor)

        def wait() -> Tensor:
            previous()
            return arrive()

        return wait


class _Select(torch.autograd.Function):
    """Experts of a stack, the same one several times if several ranks need it; the backward adds up their gradients."""

    @staticmethod
    def forward(context: Any, stack: Tensor, experts: list[int]) -> Tensor:
        context.experts, context.shape = experts, stack.shape
        return stack.index_select(0, torch.tensor(experts, dtype=torch.int64, device=stack.device))

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        if not context.experts:
            return None, None  # no zeros to add to the gradient of a rank that lends nothing
        gradients = gradient.new_zeros(context.shape)
        for expert, part in zip(context.experts, gradient, strict=True):
            gradients[expert] += part  # not index_add_, whose order on GPUs is not fixed
        return gradients, None
