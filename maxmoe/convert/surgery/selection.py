"""The layers and experts that an operation changes, and whether they can be changed."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from maxmoe.checks.fields import nearest
from maxmoe.expert_load.stats_accumulator import unwrapped_path
from maxmoe.nn import Experts, MoE, Router, local_dispatcher

# Ids of experts, integers or an integer tensor (N,).
ExpertIds: TypeAlias = Sequence[int] | Tensor

Value = TypeVar("Value")

# MoE layers by path, each with a value.
Layers: TypeAlias = dict[str, tuple[MoE, Value]]


def layers_of(model: nn.Module, values: Value | Mapping[str, Value]) -> Layers[Value]:
    """Return the MoE layers of a model and the value of each, by their paths in `StepStats.layers`.

    Args:
        model: model with `MoE` layers, or a layer.
        values: value of all layers, or of some by path.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "surgery comes before DistributedDataParallel, which reduces gradients of the parameters that are replaced"
        )
    modules = model.named_modules()
    layers = {unwrapped_path(model, path) or "moe": module for path, module in modules if isinstance(module, MoE)}
    if not layers:
        raise ValueError(f"{type(model).__name__} must have layers of type MoE, got none")
    if not isinstance(values, Mapping):
        return {path: (layer, values) for path, layer in layers.items()}
    for path in values:
        if path not in layers:
            raise ValueError(f"{type(model).__name__} has no MoE layer {path!r}{nearest(path, layers)}")
    return {path: (layers[path], value) for path, value in values.items()}


def as_list(path: str, name: str, values: Any) -> list[Any]:
    """Return the elements of a sequence, a tensor or an array; raises for anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        raise ValueError(f"{path}: {name} must be a sequence, got {values!r}")
    return list(values)


def expert_ids(path: str, layer: MoE, experts: ExpertIds, *, unique: bool = True) -> list[int]:
    """Return ids of experts as integers; raises for one out of range, and for a repeated one if they are `unique`."""
    num_experts = layer.config.num_experts
    ids = as_list(path, "experts", experts)
    for place, expert in enumerate(ids):
        is_id = hasattr(expert, "__index__") and not isinstance(expert, bool)
        if not is_id or not 0 <= index(expert) < num_experts:
            raise ValueError(f"{path}: experts must be integers in [0, num_experts ({num_experts})), got {expert!r}")
        ids[place] = index(expert)
    repeated = sorted({expert for expert in ids if ids.count(expert) > 1})
    if unique and repeated:
        raise ValueError(f"{path}: experts must be named once, got {repeated[0]} {ids.count(repeated[0])} times")
    return ids


def check_layer(path: str, layer: MoE) -> None:
    """Raise unless router and experts are those of the library, in one process, without adapters."""
    for name, module, kind in (("router", layer.router, Router), ("experts", layer.experts, Experts)):
        for key, parameter in module.named_parameters():
            if type(parameter) is not nn.Parameter:
                raise ValueError(
                    f"{path}.{name}.{key} must be an ordinary parameter, got {type(parameter).__name__}: surgery comes "
                    "before parallelize"
                )
        if type(module) is not kind:
            raise ValueError(
                f"{path}.{name} must be a maxmoe.nn.{kind.__name__}, got {type(module).__name__}: adapters must be "
                "merged or removed before, and surgery knows no other router"
            )
    if layer.runner.dispatcher != local_dispatcher(layer.config):
        raise ValueError(
            f"{path} must have the dispatcher of one process, got {type(layer.runner.dispatcher).__name__}: surgery "
            "comes before parallelize"
        )


def check_not_shared(model: nn.Module, layers: Iterable[str]) -> None:
    """Raise if the router or the experts of one of these layers are those of another layer too."""
    chosen = {*layers}
    found: dict[nn.Parameter, str] = {}
    every: Layers[None] = layers_of(model, None)
    for path, (layer, _) in every.items():
        for parameter in {*layer.router.parameters(), *layer.experts.parameters()}:
            other = found.setdefault(parameter, path)
            if other != path and chosen & {path, other}:
                raise ValueError(f"{path} must have a router and experts of its own, got those of {other}")


def check_optimizer(optimizer: object) -> None:
    """Raise for what is not one optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
