"""What a dispatch strategy sends and saves in a training step; each strategy adds it up beside its code."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from maxmoe.config import MoEConfig
from maxmoe.declaration import SavedTensor
from maxmoe.dispatch.expert_ranks import ExpertLayout
from maxmoe.nn.dispatcher import Dispatcher
from maxmoe.sharding.planned_collective import CollectiveKind, PlannedCollective

ADJOINT: dict[CollectiveKind, CollectiveKind] = {
    "all-gather": "reduce-scatter",
    "reduce-scatter": "all-gather",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
}


@dataclass(frozen=True)
class PlannedDispatch:
    """The tokens that a rank dispatches in one layer and one training step, if routing is balanced.

    Args:
        layout: layout of the experts of the layer.
        num_tokens: T, number of tokens of this rank.
        num_chunks: number of chunks of the tokens, dispatched one after the other.
        dtype: dtype of the hidden states.
        is_recomputed: whether activation checkpointing runs the layer again in the backward.
        recomputes_input: whether the input of the experts is computed again in the backward.
    """

    layout: ExpertLayout
    num_tokens: int
    num_chunks: int
    dtype: torch.dtype
    is_recomputed: bool
    recomputes_input: bool

    @property
    def config(self) -> MoEConfig:
        """Configuration of the layer."""
        return self.layout.config

    @property
    def num_ranks(self) -> int:
        """P, number of ranks of the group."""
        return self.layout.mesh.size(*self.layout.group_axes)

    @property
    def num_group_experts(self) -> int:
        """Number of experts on all ranks of the group."""
        return self.layout.num_local_experts * self.num_ranks

    @property
    def num_slots(self) -> int:
        """T * K."""
        return self.num_tokens * self.config.top_k

    @property
    def weights_dtype(self) -> torch.dtype:
        """Dtype of the routing weights: float32 or wider."""
        return torch.promote_types(self.dtype, torch.float32)

    def chunks(self) -> Iterator["PlannedDispatch"]:
        """Split the tokens as `torch.tensor_split`: the first chunks have one token more."""
        for index in range(self.num_chunks):
            num_tokens = self.num_tokens // self.num_chunks + (index < self.num_tokens % self.num_chunks)
            yield replace(self, num_tokens=num_tokens, num_chunks=1)

    def counts(self, num_counts: int) -> PlannedCollective:
        """Return the all-gather of `num_counts` row counts per rank; activation checkpointing keeps its result."""
        return self._collective("counts, forward", "all-gather", (self.num_ranks, num_counts), torch.int64)

    def rows(
        self,
        name: str,
        kind: CollectiveKind,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        *,
        has_gradient: bool = True,
        is_input: bool = False,
    ) -> Iterator[PlannedCollective]:
        """List a collective of rows in the forward, its repetition in the backward if any, and its adjoint if any.

        `shape` is that of the gathered tensor, of that before a reduce-scatter, of that sent in an all-to-all; `dtype`
        defaults to that of the hidden states; `is_input` says that the result is the input of the experts.
        """
        yield self._collective(f"{name}, forward", kind, shape, dtype or self.dtype)
        backward = self._collective(f"{name}, backward", kind, shape, dtype or self.dtype)
        if self.is_recomputed or (is_input and self.recomputes_input):
            yield backward
        if has_gradient:
            yield backward._replace(kind=ADJOINT[kind])

    def saved_input(self, num_rows: int) -> SavedTensor:
        """Return the hidden states ``(num_rows, D)`` that have arrived for the experts of this rank."""
        return SavedTensor((num_rows, self.config.hidden_size), (None, None), is_kept=not self.recomputes_input)

    def saved_by_local_dispatcher(self, num_tokens: int, top_k: int) -> Iterator[SavedTensor]:
        """List routing weights, slots and group sizes that the local dispatcher saves for tokens that have arrived."""
        yield SavedTensor((num_tokens, top_k), (None, None), self.weights_dtype)
        yield SavedTensor((num_tokens * top_k,), (None,), torch.int64)
        yield SavedTensor((self.num_chunks, self.layout.num_local_experts), (None, None), torch.int64)

    def _collective(
        self, purpose: str, kind: CollectiveKind, shape: tuple[int, ...], dtype: torch.dtype
    ) -> PlannedCollective:
        axes = tuple(axis for axis in self.layout.mesh.axes if axis in self.layout.group_axes)
        passes = 2 if kind == "all-reduce" else 1  # a reduce-scatter and an all-gather
        num_bytes = passes * math.prod(shape) * dtype.itemsize * (self.num_ranks - 1) // self.num_ranks
        return PlannedCollective(purpose, kind, axes, num_bytes)


class Strategy(Protocol):
    """A way to dispatch tokens between ranks: it makes a `Dispatcher`, and lists its collectives and saved tensors.

    CONTRIBUTING.md lists what a new strategy needs.

    Attributes:
        keeps_sequences: whether the rank of an expert gets whole sequences, which `capacity_factor` needs.
        has_partial_outputs: whether the outputs of ranks with the same tokens are partial sums, which the
            tensor-parallel region of the layer reduces.
    """

    keeps_sequences: ClassVar[bool]
    has_partial_outputs: ClassVar[bool]

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> Dispatcher[Any]:
        """Make the dispatcher of this process."""
        ...

    @staticmethod
    def planned_collectives(tokens: PlannedDispatch) -> Iterator[PlannedCollective]:
        """List the collectives of a training step for one chunk of tokens."""
        ...

    @staticmethod
    def planned_saved_tensors(tokens: PlannedDispatch) -> Iterator[SavedTensor]:
        """List the saved tensors of a training step that no module declares, with their shapes on this rank."""
        ...


class LocalStrategy:
    """The strategy of ranks that communicate nothing: each computes its experts for its own tokens."""

    keeps_sequences: ClassVar[bool] = True
    has_partial_outputs: ClassVar[bool] = True

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> Dispatcher[Any]:
        """Make the dispatcher of this process."""
        return layout.local_dispatcher()

    @staticmethod
    def planned_collectives(_tokens: PlannedDispatch) -> Iterator[PlannedCollective]:
        """List the collectives of a training step for one chunk of tokens."""
        return iter(())

    @staticmethod
    def planned_saved_tensors(tokens: PlannedDispatch) -> Iterator[SavedTensor]:
        """List the saved tensors of a training step that no module declares, with their shapes on this rank."""
        return tokens.saved_by_local_dispatcher(tokens.num_tokens, tokens.config.top_k)
