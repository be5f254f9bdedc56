"""Auxiliary losses and statistics of all MoE layers of a model, over the micro-batches of an optimizer step."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe._torch.join import is_within_join, watch_joins
from maxmoe._torch.wrappers import unwrapped_path
from maxmoe.expert_load.metrics_accumulator import MetricsAccumulator, packed_size, unpacked
from maxmoe.expert_load.stats import BoundedMoEStats
from maxmoe.ranks import named_collectives
from maxmoe.ranks.checksum import are_equal, checksum
from maxmoe.ranks.token_group import FlattenedBatch, LocalTokens

NUM_BINS = 1000  # of the histograms of `maxmoe.nn.required_bias_histogram`


class StepStats(NamedTuple):
    """Auxiliary loss and statistics of one optimizer step.

    Attributes:
        aux_loss: ``()``, float64, mean over the calls of each layer, summed over the layers. The balance loss of the
            scope "step" is the one whose gradient was taken, with the counts that it had in the backward.
        layers: statistics of each layer, by its path in the model, without the names that DDP, FSDP1 and
            `torch.compile` add; "moe" for a layer that is the model itself. Counts are summed over the calls of a
            layer, the entropy is the mean.
    """

    aux_loss: Tensor
    layers: dict[str, BoundedMoEStats]


class StatsAccumulator:
    """Sums the auxiliary losses and statistics of all MoE layers of a model over the micro-batches of a step.

    A forward is counted when its backward runs, so that evaluation is not counted, and a forward under activation
    checkpointing is counted once. Layers before the first trained parameter have no backward. Two calls of `backward`
    through one forward count it twice; `torch.autograd.grad` and ``backward(inputs=...)``, which leave the gradients of
    other tensors alone, do not count it. A model has one accumulator; a new one replaces the previous one::

        accumulator = maxmoe.StatsAccumulator(model)
        for batch in micro_batches:
            loss(model(batch)).backward()
        optimizer.step()
        step = accumulator.update()

    With `maxmoe.pipeline`, pass `Pipeline.model`; the statistics have the layers of all stages.

    Args:
        model: model with `MoE` or `MoEFeedForward` layers, on its final device.
        process_group: ranks with different tokens under DDP or FSDP, over which counts are summed; None for the default
            group, as in DDP. Not used for layers run by `parallelize`, which report global values.

    Raises:
        ValueError: if the model has no such layer.
    """

    def __init__(self, model: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        self._layers: dict[str, Any] = {
            unwrapped_path(model, path) or "moe": module
            for path, module in model.named_modules()
            if hasattr(module, "metrics_accumulator")
        }
        self._stages: Any = getattr(model, "layers_of_stages", None)  # of a pipeline
        if not self._layers and self._stages is None:
            raise ValueError(f"{type(model).__name__} must have layers of type MoE, got none")
        self._process_group = process_group
        if dist.is_initialized():
            watch_joins()
        for layer in self._layers.values():
            num_bins = NUM_BINS if layer.config.correction_bias_rule == "quantile" else 0
            device = next(layer.parameters()).device
            layer.metrics_accumulator = MetricsAccumulator(
                layer.config.num_selectable_experts, num_bins, device, process_group
            )

    def reset(self) -> None:
        """Forget the micro-batches since the last update, for a step that ended early, for example by an error."""
        for layer in self._layers.values():
            layer.metrics_accumulator.take()
            layer.metrics_accumulator.use.take(layer.metrics_accumulator.leaf)

    @torch.no_grad()
    def update(self) -> StepStats:
        """End a step: update the correction biases of the layers that have one, and reset the sums.

        The bias of a layer is not updated if the layer is in eval mode, if no parameter of its router requires a
        gradient, or if it got no token. `update` is collective: all ranks must call it.

        Returns:
            Auxiliary loss and statistics of the step, over all ranks.

        Raises:
            ValueError: if the correction bias of a layer has 16 bits, or differs between the ranks.
            RuntimeError: within the `join` of DDP, where ranks may take different numbers of steps.
        """
        if is_within_join():
            raise RuntimeError(
                "update() must be called by all ranks, and within join a rank may end before the others: call it after "
                "the context, once for all its steps"
            )
        sums = self._sums_over_ranks()
        sizes = {name: packed_size(layer.config.num_selectable_experts) for name, layer in self._layers.items()}
        accumulators = {name: layer.metrics_accumulator for name, layer in self._layers.items()}
        metrics = {name: (sums[name][:size], accumulators[name].use.take(sums[name])) for name, size in sizes.items()}
        if self._stages is not None:
            metrics = self._stages.all_reduce(metrics)
        aux_losses, stats = [], {}
        for name, of_layer in metrics.items():
            calls, aux_loss, stats[name] = unpacked(*of_layer)
            aux_losses.append(aux_loss / calls.clamp_min(1))
        for name, layer in self._layers.items():
            router = layer.balanced_router
            if router is None or not is_trained(layer):
                continue
            if layer.config.correction_bias_rule == "quantile":
                histogram = sums[name][sizes[name] : layer.metrics_accumulator.leaf.numel()]
                router.update_correction_bias_by_quantiles(histogram.view(-1, NUM_BINS))
            else:
                router.update_correction_bias(stats[name].tokens_per_expert)
        return StepStats(torch.stack(aux_losses).sum(), stats)

    def _sums_over_ranks(self) -> dict[str, Tensor]:
        """Reset the sums of the layers and return them, summed over the ranks; check that all have the same biases.

        All layers that are not run by `parallelize` share one all-reduce over the process group. The others have
        metrics over the ranks already, and reduce the rest over their token group.
        """
        none = torch.zeros(0)
        checksums = {
            name: none if (router := layer.balanced_router) is None else checksum(router.wide_correction_bias())
            for name, layer in self._layers.items()
        }
        sums = {name: layer.metrics_accumulator.take() for name, layer in self._layers.items()}
        if not dist.is_initialized():
            return sums
        local: list[Tensor] = []
        for name, layer in self._layers.items():
            sums[name] = torch.cat([sums[name], checksums[name].to(sums[name])])
            if isinstance(layer.token_group, LocalTokens):
                local.append(sums[name])
            elif layer.config.score_correction_bias:
                rest = sums[name][packed_size(layer.config.num_selectable_experts) :]
                rest.copy_(*FlattenedBatch(layer.token_group).all_reduce_sequence(rest))
        if local:
            packed = torch.cat(local)
            named_collectives.all_reduce(packed, "sums of layers", group=self._process_group)
            for tensor, total in zip(local, torch.split(packed, [len(tensor) for tensor in local]), strict=True):
                tensor.copy_(total)
        self._check_biases({name: sums[name][-3:] for name in sums if checksums[name].numel()})
        return sums

    def _check_biases(self, checksums: dict[str, Tensor]) -> None:
        # The only wait for the device, once per step.
        equal = torch.stack([are_equal(total) for total in checksums.values()]).tolist() if checksums else []
        for name, is_equal in zip(checksums, equal, strict=True):
            if not is_equal:
                bias = self._layers[name].balanced_router.score_correction_bias.tolist()
                raise ValueError(
                    f"the ranks must agree on the correction bias of {name!r}, got "
                    f"{bias} on rank {dist.get_rank()} and another one elsewhere: all "
                    "ranks must call update after the same steps, with the same layers frozen or in eval mode"
                )


def is_trained(layer: Any) -> bool:
    """Return whether a layer is in train mode and its router is not frozen."""
    requires_grad = [parameter.requires_grad for parameter in layer.part("router").parameters()]
    # FSDP1 leaves no parameters in a module if it flattens them.
    return layer.training and (any(requires_grad) or not requires_grad)
