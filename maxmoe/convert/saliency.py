"""Saliency of experts: how much each of them adds to the outputs of its layer, measured while a model runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe._torch import never_compiled
from maxmoe._torch.wrappers import unwrapped_path
from maxmoe.checks.fields import check_int
from maxmoe.nn import ExpertRunner, MoELayer, local_dispatcher
from maxmoe.nn.routing import TopK
from maxmoe.nn.windows import BufferUse
from maxmoe.ranks import named_collectives
from maxmoe.ranks.token_group import FlattenedBatch, LocalTokens
from maxmoe.recompute.selective import is_recomputation

__all__ = ["Saliency", "record_saliency"]


class Saliency:
    """Saliency of the experts of each layer, from `record_saliency`. Tensors are by the path of the layer."""

    def __init__(self, layers: Mapping[str, MoELayer]) -> None:
        self._num_groups = {path: layer.config.num_groups for path, layer in layers.items()}
        # Of each expert: sum of weight times norm, number of tokens. Slots without a computed expert add to the last
        # column.
        self._sums = {
            path: torch.zeros(
                2, layer.config.num_experts + 1, dtype=torch.float64, device=next(layer.parameters()).device
            )
            for path, layer in layers.items()
        }

    @property
    def tokens_per_expert(self) -> dict[str, Tensor]:
        """Number of tokens routed to each expert ``(E,)``, int64."""
        return {path: sums[1, :-1].long() for path, sums in self._sums.items()}

    @property
    def means(self) -> dict[str, Tensor]:
        """Saliency of each expert ``(E,)``, float64; 0 for an expert without tokens."""
        return {path: sums[0, :-1] / sums[1, :-1].clamp_min(1) for path, sums in self._sums.items()}

    def lowest(self, count: int) -> dict[str, Tensor]:
        """Return the ids of the experts of lowest saliency in each layer, for `prune_experts`.

        Of a layer whose router has groups, equally many of each group, because the groups must keep one size.

        Args:
            count: number of experts of each layer.

        Returns:
            Ids ``(count,)``, int64; of experts with equal saliency, the lowest ids.

        Raises:
            ValueError: for a count that is not below the number of experts, or not a multiple of the number of groups.
        """
        check_int("count", count, at_least=1)
        ids = {}
        for path, means in self.means.items():
            num_groups = self._num_groups[path]
            if count >= len(means) or count % num_groups:
                raise ValueError(
                    f"count must be below the {len(means)} experts of {path} and a multiple of its {num_groups} "
                    f"groups, got {count}"
                )
            in_groups = means.view(num_groups, -1).argsort(dim=1, stable=True)[:, : count // num_groups]
            first = torch.arange(0, len(means), len(means) // num_groups, device=means.device)
            ids[path] = (in_groups + first.unsqueeze(1)).flatten()
        return ids

    def _add(self, path: str, experts: Tensor, values: Tensor) -> None:
        """Add values ``(T,)`` of tokens to the sums of the experts ``(T,)``; -1 for no computed expert."""
        sums = self._sums[path]
        columns = experts.where((experts >= 0) & (experts < sums.shape[1] - 1), sums.shape[1] - 1)
        sums.index_add_(1, columns, torch.stack([values.double(), torch.ones_like(values, dtype=torch.float64)]))

    def _sum_over_ranks(self, layers: Mapping[str, MoELayer]) -> None:
        """Add the sums of the ranks that have other tokens."""
        for path, layer in layers.items():
            sums, tokens = self._sums[path], layer.token_group
            if not isinstance(tokens, LocalTokens):
                sums.copy_(*FlattenedBatch(tokens).all_reduce_sequence(sums))
            elif dist.is_initialized():
                named_collectives.all_reduce(sums, "saliency of experts")


@contextmanager
def record_saliency(model: nn.Module) -> Iterator[Saliency]:
    """Measure the saliency of the routed experts of all MoE layers of a model, in every call except recomputations.

    saliency[e] = mean over the tokens t routed to e of w[t, e] * ||expert_e(x[t])||

    w are the routing weights as the layer uses them, normalized and scaled, the norm is over the hidden dim, of latent
    experts over the latent dim. Where the weights multiply the inputs of the experts, the norms are of experts of the
    unweighted inputs. Padding is not counted. What `capacity_factor` or `buffer_factor` drops is computed and counted
    here. Zero, copy and constant experts, which cannot be pruned, are left out. The outputs of the model are the same;
    a forward computes its experts twice::

        with torch.no_grad(), record_saliency(model) as saliency:
            for batch in batches:
                model(batch)
        prune_experts(model, saliency.lowest(8))

    Args:
        model: model with layers of type `MoELayer`, such as `MoE` and the layers of `replace_moe_blocks`, or a layer.
            The experts may be quantized, and have adapters. On a mesh, under DDP and under FSDP, all ranks must enter
            and leave the context; the saliency is then over the tokens of all ranks, the same on every rank. In a
            pipeline it is of the layers of this rank.

    Yields:
        Saliency, to whose sums every call adds; on several ranks, of this rank alone until the context ends.

    Raises:
        ValueError: for a model without such layers, and for a layer on a mesh that drops slots.

    Source: REAP, router-weighted expert activation pruning (arXiv:2510.13999).
    """
    found = ((path, module) for path, module in model.named_modules() if isinstance(module, MoELayer))
    layers = {unwrapped_path(model, path) or "moe": module for path, module in found}
    if not layers and not hasattr(model, "layers_of_stages"):
        raise ValueError(
            f"{type(model).__name__} must have layers of type MoELayer, got none: in a model of transformers, call "
            "replace_moe_blocks(model) first"
        )
    saliency = Saliency(layers)
    runners = {path: layer.runner for path, layer in layers.items()}
    recording = {path: _recording(path, layer, saliency) for path, layer in layers.items()}
    try:
        for path, layer in layers.items():
            layer.runner = recording[path]
        yield saliency
    finally:
        for path, layer in layers.items():
            layer.runner = runners[path]
    saliency._sum_over_ranks(layers)


@dataclass(frozen=True, eq=False, kw_only=True)
class _RecordingRunner(ExpertRunner):
    """The runner of a layer, which computes the experts a second time, one slot of the tokens after the other.

    The output of a token with one slot is the output of its expert, whatever the mesh and the dispatcher are.

    Args:
        whole: runner that drops nothing.
        add: function that takes the experts ``(T,)`` of the tokens and weight times norm ``(T,)``.
    """

    whole: ExpertRunner
    add: Callable[[Tensor, Tensor], None]

    def run(self, experts: Callable[..., Tensor], x: Tensor, top_k: TopK, **options: Any) -> tuple[Tensor, BufferUse]:
        """Record, and then run as the runner of the layer."""
        if not is_recomputation():
            self._record(experts, x, top_k, options["num_sequences"])
        return super().run(experts, x, top_k, **options)

    @never_compiled
    @torch.no_grad()
    def _record(self, experts: Callable[..., Tensor], x: Tensor, top_k: TopK, num_sequences: int) -> None:
        for weights, ids in zip(top_k.weights.unbind(1), top_k.experts.unbind(1), strict=True):
            slot = TopK(torch.ones_like(weights).unsqueeze(1), ids.unsqueeze(1), top_k.is_unpadded)
            outputs, _ = self.whole.run(experts, x, slot, num_sequences=num_sequences)
            outputs = self.region.reduce_from_experts(outputs)  # a no-op unless the ranks have partial sums
            wide = torch.promote_types(outputs.dtype, torch.float32)
            norms = torch.linalg.vector_norm(outputs, dim=1, dtype=wide)
            self.add(ids, weights * norms)


def _recording(path: str, layer: MoELayer, saliency: Saliency) -> _RecordingRunner:
    """Return the runner that records the saliency of a layer."""
    config, whole = layer.config, layer.runner
    if config.may_drop:
        if whole.dispatcher != local_dispatcher(config):
            raise ValueError(
                f"{path} must drop no slots on a mesh, got capacity_factor {config.capacity_factor} and buffer_factor "
                f"{config.buffer_factor}: record its saliency before parallelize"
            )
        whole = ExpertRunner(local_dispatcher(replace(config, capacity_factor=None, buffer_factor=None)))
    return _RecordingRunner(
        dispatcher=layer.runner.dispatcher,
        region=layer.runner.region,
        num_chunks=layer.runner.num_chunks,
        whole=whole,
        add=lambda experts, values: saliency._add(path, experts, values),
    )
