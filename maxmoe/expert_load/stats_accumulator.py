"""Auxiliary losses and statistics of all MoE layers of a model, over the micro-batches of an optimizer step."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from maxmoe.expert_load.layers_of_stages import LayersOfStages
from maxmoe.expert_load.metrics_accumulator import MetricsAccumulator, unpacked
from maxmoe.expert_load.rank_sums import all_reduce, new_accumulator
from maxmoe.expert_load.stats import MoEStats


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
    layers: dict[str, MoEStats]


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

    With `maxmoe.pipeline`, the model is that of the pipeline, and the statistics are those of the layers of all stages.

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
        self._stages: LayersOfStages | None = getattr(model, "layers_of_stages", None)
        if not self._layers and self._stages is None:
            raise ValueError(f"{type(model).__name__} must have layers of type MoE, got none")
        self._process_group = process_group
        self._sums: dict[str, MetricsAccumulator] = {}
        for name, layer in self._layers.items():
            self._sums[name] = layer.metrics_accumulator = new_accumulator(layer, process_group)

    def reset(self) -> None:
        """Forget the micro-batches since the last update, for a step that ended early, for example by an error."""
        for sums in self._sums.values():
            sums.reset()

    @torch.no_grad()
    def update(self) -> StepStats:
        """End a step: update the correction biases of the layers that have one, and reset the sums.

        The bias of a layer is not updated if the layer is in eval mode, if no parameter of its router requires a
        gradient, or if it got no token. `update` is collective: all ranks must call it.

        Returns:
            Auxiliary loss and statistics of the step, over all ranks.

        Raises:
            ValueError: if the correction bias of a layer has 16 bits, or differs between the ranks.
        """
        sums = all_reduce(self._layers, self._sums, self._process_group)
        metrics = {name: layer_sums.metrics for name, layer_sums in sums.items()}
        if self._stages is not None:
            metrics = self._stages.all_reduce(metrics)
        aux_losses, stats = [], {}
        for name, packed in metrics.items():
            summed = unpacked(packed)
            calls = summed.calls.clamp_min(1)
            aux_losses.append(summed.aux_loss / calls)
            stats[name] = summed.stats._replace(router_entropy=summed.stats.router_entropy / calls)
        for name, layer in self._layers.items():
            router = layer.balanced_router
            if router is None or not is_trained(layer):
                continue
            if layer.config.correction_bias_rule == "quantile":
                router.update_correction_bias_by_quantiles(sums[name].histogram)
            else:
                router.update_correction_bias(stats[name].tokens_per_expert)
        return StepStats(torch.stack(aux_losses).sum(), stats)


def is_trained(layer: Any) -> bool:
    """Return whether a layer is in train mode and its router is not frozen."""
    requires_grad = [parameter.requires_grad for parameter in layer.router.parameters()]
    # FSDP1 leaves no parameters in a module if it flattens them.
    return layer.training and (any(requires_grad) or not requires_grad)


# Names under which torch.compile, FSDP1 and checkpoint_wrapper hold the module that they wrap.
_WRAPPED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrapped_path(model: nn.Module, path: str) -> str:
    """Return the path of a submodule without the names that wrappers around it or around its parents add."""
    names = []
    for name in path.split("."):
        # The name of DDP is an ordinary one, which models use too.
        is_ddp = name == "module" and isinstance(model, DataParallel | DistributedDataParallel)
        if not is_ddp and name not in _WRAPPED_NAMES:
            names.append(name)
        model = model.get_submodule(name)
    return ".".join(names)
