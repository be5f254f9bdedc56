"""How tokens reach their experts: the interfaces of a layer with other processes, and the runner that calls them.

Shapes: T tokens of this process, K top_k, D hidden_size, N rows of the experts' input, E experts, L local experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maxmoe.nn.routing import TopK
from maxmoe.nn.windows import BufferUse, Windows
from maxmoe.ops import RaggedPlan
from maxmoe.recompute.freed_storage import Recomputation, Rematerialized

T = TypeVar("T")

# Function that waits for a result, such as the output of a collective, and returns it.
Future: TypeAlias = Callable[[], T]


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Input of the experts. Each dispatcher has a subclass with the tensors that its `combine` needs.

    Attributes:
        x: ``(N, D)``, tokens, or rows that are sorted by expert.
        weights: ``(N, K)``, routing weights that `Experts` multiplies with the outputs; None for ones.
        plan: rows of x that each expert computes.
        dropped: ``()``, int64, number of dropped slots.
        recomputations: recomputations of the tensors that autograd saves between the input of `dispatch` and x, in
            order. The first one starts from the input of `dispatch`, the last one computes x.
    """

    x: Tensor
    weights: Tensor | None
    plan: RaggedPlan
    dropped: Tensor
    recomputations: tuple[Recomputation, ...] = ()

    def compute(self, experts: Callable[..., Tensor]) -> Tensor:
        """Call `Experts`, or a function with the same arguments, with this input."""
        return experts(self.x, self.weights, self.plan)


D = TypeVar("D", bound=Dispatched)
C = TypeVar("C")


class Dispatcher(Protocol[D, C]):
    """Interface of dispatchers, such as `LocalDispatcher` and the strategies of `maxmoe.parallel.dispatch`."""

    def exchange_counts(
        self, chunks: Sequence[TopK], num_sequences: int, dtype: torch.dtype
    ) -> Sequence[C | Windows[C]]:
        """Exchange the counts that processes must know of each other, once for all chunks of the tokens.

        Args:
            chunks: expert ids and routing weights of each chunk.
            num_sequences: B, number of sequences in all chunks.
            dtype: dtype of the tokens.

        Returns:
            Counts of each chunk, for `dispatch`; with a buffer whose overflow is computed, of each window of its rows.
        """
        ...

    def dispatch(self, x: Tensor, top_k: TopK, counts: C, /) -> Future[D]:
        """Start the dispatch of a chunk of tokens to their experts.

        Args:
            x: ``(T, D)``, floating, tokens of B sequences of equal length, one sequence after the other.
            top_k: expert ids and routing weights of the tokens.
            counts: counts of the chunk, from `exchange_counts`.

        Returns:
            Function that waits for the input of `Experts` and returns it.
        """
        ...

    def combine(self, outputs: Tensor, dispatched: D) -> Future[Tensor]:
        """Start the combination of the outputs of the experts.

        Args:
            outputs: ``(N, D)``, outputs of `Experts`.
            dispatched: input of `Experts` that `dispatch` returned.

        Returns:
            Function that waits for ``(T, D)``, the weighted sum over the experts of each token, and returns it.
        """
        ...


class LayerInputs(NamedTuple):
    """Tokens ``(T, D)`` as input of each part of the layer: equal values whose gradients are reduced differently.

    Attributes:
        router: input of the router, which every process computes whole, so that each has the whole gradient.
        experts: input of the routed experts; every process has a summand of its gradient. With latent experts, input of
            the projection before them, whose gradient is whole.
        shared_experts: input of the shared experts; its gradient is whole or a summand, as the region decides.
    """

    router: Tensor
    experts: Tensor
    shared_experts: Tensor


@dataclass(frozen=True)
class TensorParallelRegion:
    """Region of a process that computes the whole layer for its tokens, without communication.

    In regions of several processes that compute parts of the layer for the same tokens, subclasses communicate before
    and after the parts.
    """

    def enter(self, x: Tensor) -> LayerInputs:
        """Return the tokens x ``(T, D)`` as input of each part of the layer."""
        return LayerInputs(x, x, x)

    def assign(self, top_k: TopK) -> TopK:
        """Return `top_k`, computed by every process; the gradient of the weights is summed over the processes."""
        return top_k

    def copy_to_experts(self, latent: Tensor) -> Tensor:
        """Return latent rows ``(T, L)``, computed by every process; their gradient is summed over the processes."""
        return latent

    def reduce_from_experts(self, latent: Tensor) -> Tensor:
        """Return the sum over the processes of the outputs ``(T, L)`` of latent experts; every process gets it."""
        return latent

    def whole_sum(self, routed: Tensor, shared: Tensor | None, whole: Tensor | None = None) -> Tensor:
        """Return the output ``(T, D)`` of the layer, whole on every process, with arguments as `leave`."""
        return sum_of(routed, shared, whole)

    def leave(self, routed: Tensor, shared: Tensor | None, whole: Tensor | None = None) -> Tensor:
        """Return the sum of routed and shared experts over the processes, plus `whole`.

        Args:
            routed: ``(T, D)``, output of the routed experts of this process. With latent experts, output of the
                projection after them, which every process has computed whole.
            shared: ``(T, D)``, output of the shared experts; None for a layer without shared experts.
            whole: ``(T, D)``, summand that every process computes from the input of the router; None for no summand.

        Returns:
            ``(T, D)``, output of the layer; if the residual stream is sharded, this rank's shard of the hidden dim.
        """
        return sum_of(routed, shared, whole)

    def all_reduce_dropped(self, dropped: Tensor) -> Tensor:
        """Return the sum of the number ``()`` of dropped slots over the processes that drop different slots."""
        return dropped


def sum_of(total: Tensor, *summands: Tensor | None) -> Tensor:
    """Return the sum of a tensor and of the summands that are not None."""
    for summand in summands:
        if summand is not None:
            total = total + summand
    return total


@dataclass(frozen=True)
class ExpertRunner:
    """Runs the routed experts of a layer: dispatch, experts, combine.

    A layer in one process has a runner with a local dispatcher. `maxmoe.parallelize` sets a runner for the mesh.

    Args:
        dispatcher: dispatcher of the layer.
        region: tensor-parallel region, for processes that compute parts of the layer for the same tokens.
        num_chunks: number of chunks into which the tokens are split. Must be one for a dispatcher that needs whole
            sequences.
    """

    dispatcher: Dispatcher[Any, Any]
    region: TensorParallelRegion = field(default_factory=TensorParallelRegion)
    num_chunks: int = 1

    def run(
        self,
        experts: Callable[..., Tensor],
        x: Tensor,
        top_k: TopK,
        *,
        num_sequences: int = 1,
        recompute: bool = False,
    ) -> tuple[Tensor, BufferUse]:
        """Dispatch tokens to their experts, compute the experts, and combine their outputs.

        While the experts compute a chunk, the next chunk is dispatched and the previous one is combined. Autograd runs
        the backward in reverse order, with the same overlap.

        Args:
            experts: `Experts`, or a function with the arguments of its forward; called once per chunk.
            x: ``(T, D)``, floating, tokens.
            top_k: expert ids and routing weights of the tokens.
            num_sequences: B, number of sequences in x.
            recompute: whether tensors that the dispatcher can recompute are freed between forward and backward.

        Returns:
            Combined outputs ``(T, D)``, and what the buffers have dropped or required.
        """
        dispatch, combine = self.dispatcher.dispatch, self.dispatcher.combine
        tokens, top_k_chunks = x.tensor_split(self.num_chunks), top_k.tensor_split(self.num_chunks)
        counts = self.dispatcher.exchange_counts(top_k_chunks, num_sequences, x.dtype)
        windows = [each for each in counts if isinstance(each, Windows)]
        if any(len(each.counts) > 1 for each in windows):
            parts = zip(tokens, top_k_chunks, windows, strict=True)
            sums = [self._sum_over_windows(experts, *part) for part in parts]
            return torch.cat(sums), BufferUse.of(top_k.experts.new_zeros(()), windows)
        if windows:
            counts = [count for each in windows for count in each.counts]
        arriving = dispatch(tokens[0], top_k_chunks[0], counts[0])
        returning, dropped, recomputed = [], [], []
        for index in range(self.num_chunks):
            dispatched = arriving()
            # The dispatch of the next chunk starts before the experts compute this one, so that the two overlap.
            if index + 1 < self.num_chunks:
                arriving = dispatch(tokens[index + 1], top_k_chunks[index + 1], counts[index + 1])
            outputs = dispatched.compute(experts)
            returning.append(combine(outputs, dispatched))
            dropped.append(dispatched.dropped)
            if recompute:
                recomputed.append(Rematerialized(tokens[index], dispatched.recomputations, outputs))
        # Waits come last, so that no combination delays the experts of the next chunk.
        combined = [chunk() for chunk in returning]
        for part, chunk in zip(recomputed, combined, strict=recompute):
            part.start_before_backward_of(chunk)
        if self.num_chunks == 1:
            return combined[0], BufferUse.of(dropped[0], windows)
        return torch.cat(combined), BufferUse.of(torch.stack(dropped).sum(), windows)

    def _sum_over_windows(
        self, experts: Callable[..., Tensor], x: Tensor, top_k: TopK, windows: Windows[Any]
    ) -> Tensor:
        """Run a chunk of tokens without overlap, one window of its rows after the other; nothing is dropped.

        A window saves nothing for the backward, which dispatches and computes it again before its own backward.
        """

        def compute(x: Tensor, weights: Tensor, window: Any) -> tuple[Tensor, Dispatched]:
            dispatched = self.dispatcher.dispatch(x, top_k._replace(weights=weights), window)()
            return dispatched.compute(experts), dispatched

        def sum_of_window(window: Any) -> Tensor:
            outputs, dispatched = checkpoint(compute, x, top_k.weights, window, use_reentrant=False)
            combined: Tensor = self.dispatcher.combine(outputs, dispatched)()
            return combined

        return reduce(torch.add, map(sum_of_window, windows.counts))
