"""Replacement of the experts of a layer: parameters, correction bias, config, and the state of the optimizer."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from maxmoe.checks.early_optimizers import mark_replaced
from maxmoe.config import MoEConfig
from maxmoe.convert.surgery.selection import check_layer
from maxmoe.nn import MoE, local_dispatcher
from maxmoe.quantization import QuantizedWeight, put_stack

# For each new expert, the old experts whose mean it is.
Sources: TypeAlias = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Replacement:
    """New experts of a layer. `plan` checks everything that can fail, `apply` changes the layer.

    Args:
        path: path of the layer in the model, for messages.
        layer: layer to change.
        config: config of the layer afterwards.
        sources: for each new expert, the old experts whose mean it is, in the order of the lowest ones.
        noise: standard deviation of the noise on copies, divided by that of the matrix.
    """

    path: str
    layer: MoE
    config: MoEConfig
    sources: Sources
    noise: float = 0.0

    @classmethod
    def plan(
        cls, path: str, layer: MoE, sources: Sources, *, top_k: int | None = None, noise: float = 0.0
    ) -> "Replacement":
        """Return the replacement of the experts of a layer; raises before anything is changed."""
        check_layer(path, layer)
        quantized = [name for name, each in layer.experts.named_children() if isinstance(each, QuantizedWeight)]
        if quantized and (noise or any(len(ids) > 1 for ids in sources)):
            raise ValueError(
                f"{path}.experts.{quantized[0]} must be an ordinary tensor to be averaged or to get noise, got a "
                "quantized one: only prune_experts, and duplicate_experts without noise, keep codes and scales"
            )
        _check_groups(path, layer.config, sources)
        try:
            config = dataclasses.replace(
                layer.config,
                num_experts=len(sources),
                top_k=layer.config.top_k if top_k is None else top_k,
                routed_scaling_factor=_scaling_factor(layer.config, top_k),
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return cls(path, layer, config, sources, noise)

    def check_gradients(self) -> None:
        """Raise for gradients if experts are merged or duplicated, because those of the new experts are not known."""
        if len(set(self.sources)) == len(self.sources) and all(len(ids) == 1 for ids in self.sources):
            return
        for name in ("router", "experts"):
            for key, parameter in self.layer.get_submodule(name).named_parameters(recurse=False):
                if parameter.grad is not None:
                    raise ValueError(
                        f"{self.path}.{name}.{key} must have no gradient, because that of merged or duplicated experts "
                        "is not known: call optimizer.step() before, and optimizer.zero_grad()"
                    )

    @torch.no_grad()
    def apply(self, optimizer: Optimizer | None) -> None:
        """Replace the experts, and their state in the optimizer."""
        for name, module in (("router", self.layer.router), ("experts", self.layer.experts)):
            for key, old in list(module.named_parameters(recurse=False)):
                rows = self._rows(old.detach())
                new = nn.Parameter(
                    rows if key.endswith("bias") else self._with_noise(rows), requires_grad=old.requires_grad
                )
                new.grad = None if old.grad is None else self._rows(old.grad)
                setattr(module, key, new)
                if optimizer is not None:
                    self._replace_in(optimizer, old, new)
                mark_replaced(old, f"{self.path}.{name}.{key}", after="maxmoe.convert.surgery, or be given to it")
            for key, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, key, self._rows(buffer))
            for key, weight in list(module.named_children()):
                if isinstance(weight, QuantizedWeight):
                    put_stack(module, key, weight.map(self._rows))
        self._set_config()

    def _rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of the new experts. Rows after those of the experts stay as they are."""
        num_experts = self.layer.config.num_experts
        sources = [*self.sources, *((row,) for row in range(num_experts, tensor.shape[0]))]
        if all(len(ids) == 1 for ids in sources):
            return tensor[torch.tensor([expert for (expert,) in sources], device=tensor.device)]
        return torch.stack([tensor[ids[0]] if len(ids) == 1 else tensor[list(ids)].mean(0) for ids in sources])

    def _with_noise(self, tensor: Tensor) -> Tensor:
        """Add noise to the copies of experts that came before, in a new tensor of matrices or rows of the router."""
        if not self.noise:
            return tensor
        for expert, ids in enumerate(self.sources):
            if ids in self.sources[:expert]:
                tensor[expert] += self.noise * tensor[expert].std(correction=0) * torch.randn_like(tensor[expert])
        return tensor

    def _replace_in(self, optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
        for group in optimizer.param_groups:
            group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = {
                # Moments have a row for each expert; the number of steps has no dim.
                key: self._rows(value) if isinstance(value, Tensor) and value.shape[:1] == old.shape[:1] else value
                for key, value in optimizer.state.pop(old).items()
            }

    def _set_config(self) -> None:
        layer, config = self.layer, self.config
        for part in layer.modules():
            if isinstance(getattr(part, "config", None), MoEConfig):
                part.config = config  # type: ignore[assignment]
        layer.runner = dataclasses.replace(layer.runner, dispatcher=local_dispatcher(config))
        layer.losses = dataclasses.replace(layer.losses, config=config)
        if layer.metrics_accumulator is not None:
            layer.metrics_accumulator.resize(config.num_selectable_experts)


def _check_groups(path: str, config: MoEConfig, sources: Sources) -> None:
    """Raise unless the groups of the router keep one size, and no expert is merged from two of them."""
    if config.num_groups == 1:
        return
    size = config.num_experts // config.num_groups
    sizes = [0] * config.num_groups
    for ids in sources:
        groups = sorted({expert // size for expert in ids})
        if len(groups) > 1:
            raise ValueError(f"{path}: experts must be merged within a group of the router, got {ids} of {groups}")
        sizes[groups[0]] += 1
    if len(set(sizes)) > 1:
        raise ValueError(f"{path}: the {config.num_groups} groups of the router must keep one size, got {sizes}")


def _scaling_factor(config: MoEConfig, top_k: int | None) -> float:
    """Return the factor of the routing weights with which their sum over copies is that of the originals."""
    is_shared = config.normalization != "none" or config.score_function == "softmax"
    if top_k is None or is_shared:
        return config.routed_scaling_factor
    return config.routed_scaling_factor * config.top_k / top_k
