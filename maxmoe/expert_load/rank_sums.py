"""Sums of a step over the ranks: metrics, histograms of quantile balancing, and checksums of correction biases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.expert_load.metrics_accumulator import MetricsAccumulator
from maxmoe.ranks import named_collectives
from maxmoe.ranks.checksum import are_equal, checksum
from maxmoe.ranks.token_group import FlattenedBatch, LocalTokens

# Number of bins of the histograms of `maxmoe.nn.required_bias_histogram`.
NUM_BINS = 1000


def new_accumulator(layer: Any, process_group: dist.ProcessGroup | None) -> MetricsAccumulator:
    """Return an accumulator for the metrics of a layer."""
    return MetricsAccumulator(
        layer.config.num_selectable_experts,
        num_bins=NUM_BINS if layer.config.correction_bias_rule == "quantile" else None,
        device=next(layer.parameters()).device,
        process_group=process_group,
    )


@dataclass(frozen=True)
class LayerSums:
    """Sums of one layer.

    Attributes:
        metrics: packed metrics.
        checksum: ``(3,)``, checksum of the correction bias; ``(0,)`` if there is none.
        histogram: ``(E, 1000)``, histogram of quantile balancing; ``(0,)`` for another rule.
    """

    metrics: Tensor
    checksum: Tensor
    histogram: Tensor


def all_reduce(
    layers: Mapping[str, Any], accumulators: Mapping[str, MetricsAccumulator], process_group: dist.ProcessGroup | None
) -> dict[str, LayerSums]:
    """Reset the accumulators and return their sums over the ranks, by the path of the layer.

    All layers that are not run by `parallelize` share one all-reduce over the process group. The others have sums over
    the ranks in their metrics already, and reduce the rest over their token group.

    Raises:
        ValueError: if the correction bias of a layer has 16 bits, or differs between the ranks.
    """
    checksums = {name: _checksum(layer) for name, layer in layers.items()}
    sums = {name: _take(accumulators[name], checksums[name]) for name in layers}
    if not dist.is_initialized():
        return sums
    local: list[Tensor] = []
    for name, layer in layers.items():
        rest = (sums[name].checksum, sums[name].histogram)
        if isinstance(layer.token_group, LocalTokens):
            local += (sums[name].metrics, *rest)
        elif layer.config.score_correction_bias:
            _copy(rest, FlattenedBatch(layer.token_group).all_reduce_sequence(*rest))
    if local:
        packed = torch.cat([tensor.flatten() for tensor in local])
        named_collectives.all_reduce(packed, "sums of layers", group=process_group)
        _copy(local, torch.split(packed, [tensor.numel() for tensor in local]))
    _check_biases(layers, sums)
    return sums


def _checksum(layer: Any) -> Tensor:
    router = layer.balanced_router
    return torch.zeros(0) if router is None else checksum(router.wide_correction_bias)


def _take(accumulator: MetricsAccumulator, of_bias: Tensor) -> LayerSums:
    metrics, histogram = accumulator.take(), accumulator.histogram
    return LayerSums(metrics, of_bias.to(metrics), metrics.new_zeros(0) if histogram is None else histogram.take())


def _copy(tensors: Any, sums: Any) -> None:
    for tensor, total in zip(tensors, sums, strict=True):
        tensor.copy_(total.view_as(tensor))


def _check_biases(layers: Mapping[str, Any], sums: Mapping[str, LayerSums]) -> None:
    names = [name for name in layers if sums[name].checksum.numel()]
    if not names:
        return
    # The only wait for the device, once per step.
    equal = torch.stack([are_equal(sums[name].checksum) for name in names]).tolist()
    for name, is_equal in zip(names, equal, strict=True):
        if not is_equal:
            bias = layers[name].balanced_router.score_correction_bias.tolist()
            raise ValueError(
                f"the ranks must agree on the correction bias of {name!r}, got "
                f"{bias} on rank {dist.get_rank()} and another one elsewhere: all "
                "ranks must call update after the same steps, with the same layers frozen or in eval mode"
            )
