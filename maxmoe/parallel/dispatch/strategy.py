"""Interface of the dispatch strategies: each makes a dispatcher, and lists its collectives and saved tensors."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from maxmoe.config import MoEConfig
from maxmoe.declaration import SavedTensor
from maxmoe.nn.dispatcher import Dispatched, Dispatcher
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout
from maxmoe.parallel.dispatch.lent_experts import LentExperts
from maxmoe.recompute.freed_storage import Recomputation
from maxmoe.sharding.planned_collective import CollectiveKind, PlannedCollective

S = TypeVar("S")

# Names of what strategies communicate.
TOKENS, WEIGHTS, OUTPUTS = "tokens to experts", "routing weights", "outputs of experts"

ADJOINT: dict[CollectiveKind, CollectiveKind] = {
    "all-gather": "reduce-scatter",
    "reduce-scatter": "all-gather",
    "all-to-all": "all-to-all",
}


@dataclass(frozen=True)
class PlannedDispatch:
    """The tokens that a rank dispatches in one layer and one training step, if routing is balanced.

    Args:
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
    def num_joint_slots(self) -> int:
        """Number of slots of all ranks between which tokens are communicated."""
        return self.num_slots * self.layout.mesh.size(*self.layout.token_axes)

    @property
    def num_group_rows(self) -> int:
        """Number of rows of this rank for the experts of the group."""
        return self.num_slots * self.num_group_experts // self.config.num_selectable_experts

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
        num_bytes = self._sent_bytes((self.num_ranks, num_counts), torch.int64)
        return PlannedCollective("counts, forward", "all-gather", self._axes, num_bytes)

    def rows(
        self, name: str, kind: CollectiveKind, shape: tuple[int, ...], dtype: torch.dtype | None = None, **passes: bool
    ) -> Iterator[PlannedCollective]:
        """List a collective of rows as `exchange`; `dtype` defaults to the dtype of the hidden states.

        `shape` is the shape of the output of an all-gather, and of the input of a reduce-scatter or an all-to-all.
        """
        return self.exchange(name, self._sent_bytes(shape, dtype or self.dtype), kind, **passes)

    def exchange(
        self,
        name: str,
        num_bytes: int,
        kind: CollectiveKind = "all-to-all",
        *,
        has_gradient: bool = True,
        is_input: bool = False,
        is_sent_again: bool = False,
    ) -> Iterator[PlannedCollective]:
        """List a collective in the forward, its repetition in the backward if any, and its adjoint if any.

        Args:
            name: name of the tensor.
            num_bytes: bytes that the rank that sends or receives most exchanges with other ranks.
            kind: kind of the collective.
            has_gradient: whether there is an adjoint.
            is_input: whether the result is the input of the experts.
            is_sent_again: whether the backward repeats the collective, without a recomputation too.
        """
        forward = PlannedCollective(f"{name}, forward", kind, self._axes, num_bytes)
        backward = forward._replace(purpose=f"{name}, backward")
        yield forward
        if self.is_recomputed or is_sent_again or (is_input and self.recomputes_input):
            yield backward
        if has_gradient:
            yield backward._replace(kind=ADJOINT[kind])

    def saved(self, num_rows: int, top_k: int, num_indices: int = 0) -> Iterator[SavedTensor]:
        """List what is saved if this rank receives `num_rows` tokens, and int64 indices of the plan that sent them."""
        yield SavedTensor((num_indices,), (None,), torch.int64)
        if not self.config.expert_norm:  # then the experts save sorted rows
            yield SavedTensor((num_rows, self.config.row_size), (None, None), is_kept=not self.recomputes_input)
        if self.recomputes_input and self.config.latent_size is not None:  # otherwise from the input of the layer
            yield SavedTensor((self.num_tokens, self.config.latent_size), (None, None))
        yield from self.saved_by_local_dispatcher(num_rows, top_k)

    def saved_by_local_dispatcher(self, num_tokens: int, top_k: int) -> Iterator[SavedTensor]:
        """List routing weights, slots and group sizes that the local dispatcher saves for the received tokens."""
        yield SavedTensor((num_tokens, top_k), (None, None), self.weights_dtype)
        yield SavedTensor((num_tokens * top_k,), (None,), torch.int64)
        yield SavedTensor((self.num_chunks, self.layout.num_local_experts), (None, None), torch.int64)

    def _sent_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize * (self.num_ranks - 1) // self.num_ranks

    @property
    def _axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.layout.mesh.axes if axis in self.layout.group_axes)


class Strategy:
    """Base of the ways to dispatch tokens between ranks. CONTRIBUTING.md lists what a new strategy needs.

    Attributes:
        keeps_sequences: whether the rank of an expert gets whole sequences, which `capacity_factor` needs.
        moves_experts: whether a rank may compute rows of experts that another rank owns.
    """

    keeps_sequences: ClassVar[bool] = False
    moves_experts: ClassVar[bool] = False

    def __deepcopy__(self, _memo: object) -> "Strategy":
        """Return the object itself: a process group cannot be copied, so copies of a layer share it."""
        return self

    @classmethod
    def check(cls, layout: ExpertLayout) -> None:
        """Raise ValueError for a configuration or mesh axes that the strategy cannot run with."""

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> Dispatcher[Any, Any]:
        """Make the dispatcher of this process."""
        raise NotImplementedError

    @staticmethod
    def planned_collectives(tokens: PlannedDispatch) -> Iterator[PlannedCollective]:
        """List the collectives of a training step."""
        raise NotImplementedError

    @staticmethod
    def planned_saved_tensors(tokens: PlannedDispatch) -> Iterator[SavedTensor]:
        """List the saved tensors of a training step that no module declares, with their shapes on this rank."""
        raise NotImplementedError


class LocalStrategy(Strategy):
    """The strategy without communication: each rank computes its experts for its own tokens."""

    keeps_sequences = True

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> Dispatcher[Any, Any]:
        """Make the dispatcher of this process."""
        return layout.local_dispatcher()

    @staticmethod
    def planned_collectives(tokens: PlannedDispatch) -> Iterator[PlannedCollective]:
        """List no collectives."""
        return iter(())

    @staticmethod
    def planned_saved_tensors(tokens: PlannedDispatch) -> Iterator[SavedTensor]:
        """List what the local dispatcher saves."""
        yield from tokens.saved_by_local_dispatcher(tokens.num_tokens, tokens.config.top_k)
        # Otherwise the input of the layer, which the layer declares, or sorted rows, which the experts declare.
        if tokens.config.latent_size is not None and not tokens.config.expert_norm:
            yield SavedTensor((tokens.num_tokens, tokens.config.latent_size), (None, None))


@dataclass(frozen=True, kw_only=True)
class Received(Dispatched, Generic[S]):
    """The input of this rank's experts that other ranks have sent, with what `combine` needs to send the outputs back.

    Attributes:
        local: input of the local experts, from the local dispatcher.
        sent: counts of what each rank has sent, of a type of the strategy's own.
        foreign: experts of other ranks that this rank computes as well; `plan` has the rows of its own ones.
    """

    local: Dispatched
    sent: S
    foreign: LentExperts | None = None

    @classmethod
    def of(cls, local: Dispatched, again: Recomputation, dropped: Tensor, sent: S) -> "Received[S]":
        """Add to the result of the local dispatcher what has come before it; `again` sends its input again."""
        return cls(
            x=local.x,
            weights=local.weights,
            plan=local.plan,
            dropped=dropped,
            recomputations=(again, *local.recomputations),
            local=local,
            sent=sent,
        )

    def compute(self, experts: Callable[..., Tensor]) -> Tensor:
        """Call `Experts` with this input, and with the foreign experts if there are any."""
        foreign = () if self.foreign is None else (self.foreign,)
        return experts(self.x, self.weights, self.plan, *foreign)
