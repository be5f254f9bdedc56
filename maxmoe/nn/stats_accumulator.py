"""Losses and statistics of all Mixture-of-Experts layers of a model, over the micro-batches of a step."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe.nn.accumulated_stats import MetricsAccumulator
from maxmoe.nn.losses import MoEStats
from maxmoe.nn.moe import MoE
from maxmoe.token_group import LocalTokens


class StepStats(NamedTuple):
    """What the layers of a model reported in one step.

    Attributes:
        aux_loss: ``()``, float64; the sum over the layers, of each the mean over its calls.
        layers: by the path of the layer; counts are summed over its calls, the entropy is their mean.
    """

    aux_loss: Tensor
    layers: dict[str, MoEStats]


class StatsAccumulator:
    """Sums the auxiliary losses and statistics of all MoE layers of a model over the micro-batches of a step.

    A forward counts when the backward passes it, as gradients accumulate: evaluation counts nothing, and activation
    checkpointing counts once. The last accumulator made of a model is the one that counts::

        accumulator = maxmoe.StatsAccumulator(model)
        for batch in micro_batches:
            loss(model(batch)).backward()
        optimizer.step()
        step = accumulator.update()

    Args:
        model: with `MoE` or `MoEFeedForward` layers, on its device.
        process_group: of the ranks that hold other tokens under DDP or FSDP, whose counts are added up; None for the
            default group, as in DDP. Layers run by `parallelize` report global values, and need none.

    Raises:
        ValueError: if the model has no such layer.
    """

    def __init__(self, model: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
        if not self._layers:
            raise ValueError(f"{type(model).__name__} must have layers of type MoE, got none")
        self._process_group = process_group
        self._sums: dict[str, MetricsAccumulator] = {}
        for name, layer in self._layers.items():
            self._sums[name] = MetricsAccumulator(layer.config.num_experts, next(layer.parameters()).device)
            layer.metrics_accumulator = self._sums[name]

    @torch.no_grad()
    def update(self) -> StepStats:
        """End a step: move the correction biases of all layers that have one, and begin a new sum.

        On several processes all of them call it together.

        Returns:
            What the step added up to, over all ranks.
        """
        aux_losses, stats = [], {}
        for name, packed in self._take().items():
            summed = MetricsAccumulator.unpack(packed)
            calls = summed.calls.clamp_min(1)
            aux_losses.append(summed.aux_loss / calls)
            stats[name] = summed.stats._replace(router_entropy=summed.stats.router_entropy / calls)
            layer = self._layers[name]
            if layer.config.score_correction_bias:
                layer.update_correction_bias(stats[name].tokens_per_expert)
        return StepStats(torch.stack(aux_losses).sum(), stats)

    def _take(self) -> dict[str, Tensor]:
        """Take the sum of every layer, over all ranks."""
        sums = {name: metrics_accumulator.take() for name, metrics_accumulator in self._sums.items()}
        local = [name for name, layer in self._layers.items() if isinstance(layer.token_group, LocalTokens)]
        if local and dist.is_initialized():
            packed = torch.cat([sums[name] for name in local])
            dist.all_reduce(packed, group=self._process_group)
            sums.update(zip(local, torch.split(packed, [sums[name].numel() for name in local]), strict=True))
        return sums
