"""Planned collectives and saved tensors of the dispatch strategies, which each strategy lists beside its code."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from maxmoe.config import MoEConfig
from maxmoe.declaration import SavedTensor
from maxmoe.nn.dispatcher import Dispatcher
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout
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
        expert_bytes: for each tensor of the experts' weights, the bytes of one expert on this rank, and whether the
            tensor is trained.
    """

    layout: ExpertLayout
    num_tokens: int
    num_chunks: int
    dtype: torch.dtype
    is_recomputed: bool
    recomputes_input: bool
    expert_bytes: tuple[tuple[int, bool], ...] = ()

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
    def num_group_rows(self) -> int:
        """Number of rows of this rank for the experts of the group."""
        return self.num_slots * self.num_group_experts // self.config.num_selectable_experts

    @property
    def num_rows(self) -> int:
        """Number of slots whose experts compute a row."""
        return self.config.num_balanced_rows(self.num_slots)

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

        `shape` is the shape of the output of an all-gather, and of the input of a reduce-scatter or an all-to-all;
        `dtype` defaults to the dtype of the hidden states; `is_input`: whether the result is the input of the experts.
        """
        forward = self._collective(f"{name}, forward", kind, shape, dtype or self.dtype)
        yield from self._with_backward(forward, name, has_gradient, is_input and self.recomputes_input)

    def exchange(
        self,
        name: str,
        num_bytes: int,
        *,
        has_gradient: bool = True,
        is_input: bool = False,
        is_sent_again: bool = False,
    ) -> Iterator[PlannedCollective]:
        """List an all-to-all with uneven splits as `rows`; `is_sent_again`: whether the backward repeats it anyway.

        `num_bytes` are those that the rank that sends or receives most exchanges with other ranks.
        """
        forward = PlannedCollective(f"{name}, forward", "all-to-all", self._axes, num_bytes)
        is_repeated = is_sent_again or (is_input and self.recomputes_input)
        yield from self._with_backward(forward, name, has_gradient, is_repeated)

    def _with_backward(
        self, forward: PlannedCollective, name: str, has_gradient: bool, is_repeated: bool
    ) -> Iterator[PlannedCollective]:
        backward = forward._replace(purpose=f"{name}, backward")
        yield forward
        if self.is_recomputed or is_repeated:
            yield backward
        if has_gradient:
            yield backward._replace(kind=ADJOINT[forward.kind])

    def saved_input(self, num_rows: int) -> Iterator[SavedTensor]:
        """List the rows ``(num_rows, D)`` that this rank receives for its experts, or what they are computed from."""
        yield SavedTensor((num_rows, self.config.row_size), (None, None), is_kept=not self.recomputes_input)
        if self.recomputes_input and self.config.latent_size is not None:  # otherwise from the input of the layer
            yield SavedTensor((self.num_tokens, self.config.latent_size), (None, None))

    def saved_by_local_dispatcher(self, num_tokens: int, top_k: int) -> Iterator[SavedTensor]:
        """List routing weights, slots and group sizes that the local dispatcher saves for the received tokens."""
        yield SavedTensor((num_tokens, top_k), (None, None), self.weights_dtype)
        yield SavedTensor((num_tokens * top_k,), (None,), torch.int64)
        yield SavedTensor((self.num_chunks, self.layout.num_local_experts), (None, None), torch.int64)

    def _collective(
        self, purpose: str, kind: CollectiveKind, shape: tuple[int, ...], dtype: torch.dtype
    ) -> PlannedCollective:
        passes = 2 if kind == "all-reduce" else 1  # a reduce-scatter and an all-gather
        num_bytes = passes * math.prod(shape) * dtype.itemsize * (self.num_ranks - 1) // self.num_ranks
        return PlannedCollective(purpose, kind, self._axes, num_bytes)

    @property
    def _axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.layout.mesh.axes if axis in self.layout.group_axes)


class Strategy(Protocol):
    """A way to dispatch tokens between ranks: it makes a `Dispatcher`, and lists its collectives and saved tensors.

    CONTRIBUTING.md lists what a new strategy needs.

    Attributes:
        keeps_sequences: whether the rank of an expert gets whole sequences, which `capacity_factor` needs.
        has_partial_outputs: whether the outputs of ranks with the same tokens are partial sums, which the
            tensor-parallel region of the layer reduces.
        moves_experts: whether a rank may compute rows of experts that another rank owns, which requires
            implementation="sparse" and no buffer_factor.
    """

    keeps_sequences: ClassVar[bool]
    has_partial_outputs: ClassVar[bool]
    moves_experts: ClassVar[bool]

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> Dispatcher[Any, Any]:
        """Make the dispatcher of this process."""
        ...

    @staticmethod
    def planned_collectives(tokens: PlannedDispatch) -> Iterator[PlannedCollective]:
        """List the collectives of a training step."""
        ...

    @staticmethod
    def planned_saved_tensors(tokens: PlannedDispatch) -> Iterator[SavedTensor]:
        """List the saved tensors of a training step that no module declares, with their shapes on this rank."""
        ...


class LocalStrategy:
    """The strategy without communication: each rank computes its experts for its own tokens."""

    keeps_sequences: ClassVar[bool] = True
    has_partial_outputs: ClassVar[bool] = True
    moves_experts: ClassVar[bool] = False

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> Dispatcher[Any, Any]:
        """Make the dispatcher of this process."""
        return layout.local_dispatcher()

    @staticmethod
    def planned_collectives(_tokens: PlannedDispatch) -> Iterator[PlannedCollective]:
        """List the collectives of a training step."""
        return iter(())

    @staticmethod
    def planned_saved_tensors(tokens: PlannedDispatch) -> Iterator[SavedTensor]:
        """List the saved tensors of a training step that no module declares, with their shapes on this rank."""
        yield from tokens.saved_by_local_dispatcher(tokens.num_tokens, tokens.config.top_k)
        if tokens.config.latent_size is not None:  # otherwise the input of the layer, which the layer declares
            yield SavedTensor((tokens.num_tokens, tokens.config.latent_size), (None, None))
