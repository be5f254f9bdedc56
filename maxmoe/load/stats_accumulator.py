"""Auxiliary losses and statistics of all MoE layers of a model, over the micro-batches of an optimizer step."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from maxmoe.load.layers_of_stages import LayersOfStages
from maxmoe.load.metrics_accumulator import MetricsAccumulator, unpacked
from maxmoe.load.stats import MoEStats
from maxmoe.token_group import LocalTokens


class StepStats(NamedTuple):
    """Auxiliary loss and statistics of one optimizer step.

    Attributes:
        aux_loss: ``()``, float64, mean over the calls of each layer, summed over the layers.
        layers: statistics of each layer, by its path in the model, without the names that DDP, FSDP1 and
            `torch.compile` add; "moe" for a layer that is the model itself. Counts are summed over the calls of a
            layer, the entropy is the mean.
    """

    aux_loss: Tensor
    layers: dict[str, MoEStats]


class StatsAccumulator:
    """Sums the auxiliary losses and statistics of all MoE layers of a model over the micro-batches of a step.

    A forward is counted when its backward runs, so that evaluation is not counted, and a forward under activation
    checkpointing is counted once. A model has one accumulator; a new one replaces the previous one::

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
            _unwrapped_path(model, path) or "moe": module
            for path, module in model.named_modules()
            if hasattr(module, "metrics_accumulator")
        }
        self._stages: LayersOfStages | None = getattr(model, "layers_of_stages", None)
        if not self._layers and self._stages is None:
            raise ValueError(f"{type(model).__name__} must have layers of type MoE, got none")
        self._process_group = process_group
        self._sums: dict[str, MetricsAccumulator] = {}
        for name, layer in self._layers.items():
            self._sums[name] = MetricsAccumulator(layer.config.num_experts, next(layer.parameters()).device)
            layer.metrics_accumulator = self._sums[name]

    @torch.no_grad()
    def update(self) -> StepStats:
        """End a step: update the correction biases of all layers that have one, and reset the sums.

        `update` is collective: all ranks must call it.

        Returns:
            Auxiliary loss and statistics of the step, over all ranks.
        """
        aux_losses, stats = [], {}
        for name, packed in self._take().items():
            summed = unpacked(packed)
            calls = summed.calls.clamp_min(1)
            aux_losses.append(summed.aux_loss / calls)
            stats[name] = summed.stats._replace(router_entropy=summed.stats.router_entropy / calls)
            layer = self._layers.get(name)  # None for a layer of another stage
            if layer is not None and layer.config.score_correction_bias:
                layer.update_correction_bias(stats[name].tokens_per_expert)
        return StepStats(torch.stack(aux_losses).sum(), stats)

    def _take(self) -> dict[str, Tensor]:
        """Return the packed sums of every layer over all ranks, and reset them."""
        sums = {name: metrics_accumulator.take() for name, metrics_accumulator in self._sums.items()}
        # Layers run by `parallelize` have global sums already. The sums of all other layers share one all-reduce.
        local = [name for name, layer in self._layers.items() if isinstance(layer.token_group, LocalTokens)]
        if local and dist.is_initialized():
            packed = torch.cat([sums[name] for name in local])
            dist.all_reduce(packed, group=self._process_group)
            sums.update(zip(local, torch.split(packed, [sums[name].numel() for name in local]), strict=True))
        return sums if self._stages is None else self._stages.all_reduce(sums)


# Names under which torch.compile, FSDP1 and checkpoint_wrapper hold the module that they wrap.
_WRAPPED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def _unwrapped_path(model: nn.Module, path: str) -> str:
    """Return the path of a submodule without the names that wrappers around it or around its parents add."""
    names = []
    for name in path.split("."):
        # The name of DDP is an ordinary one, which models use too.
        is_ddp = name == "module" and isinstance(model, DataParallel | DistributedDataParallel)
        if not is_ddp and name not in _WRAPPED_NAMES:
            names.append(name)
        model = model.get_submodule(name)
    return ".".join(names)
