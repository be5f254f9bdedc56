"""Surgery of experts: prune, merge and duplicate single experts of the MoE layers of a model.

The router, the state of the optimizer and the config of a layer follow. Everything is checked before a tensor changes.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from maxmoe._torch.wrappers import unwrapped_path
from maxmoe.checks.early_optimizers import mark_replaced
from maxmoe.checks.fields import check_int, check_number, nearest
from maxmoe.checks.whole_tensors import check_whole
from maxmoe.config import MoEConfig
from maxmoe.nn import Experts, MoE, local_dispatcher
from maxmoe.nn.router import make_router
from maxmoe.quantization import QuantizedWeight, put_stack

__all__ = ["duplicate_experts", "merge_experts", "prune_experts"]

# Ids of experts, integers or an integer tensor (N,).
ExpertIds: TypeAlias = Sequence[int] | Tensor

# For each new expert, the old experts whose mean it is.
_Sources: TypeAlias = Sequence[tuple[int, ...]]


def prune_experts(
    model: nn.Module, experts: ExpertIds | Mapping[str, ExpertIds], *, optimizer: Optimizer | None = None
) -> None:
    """Remove experts from the MoE layers of a model.

    The other experts keep their order. If no token selected the removed experts, the outputs are the same; with
    ``score_function="softmax"`` and ``normalization="none"`` the routing weights grow, because the softmax is over
    fewer experts, with both "softmax" they change in another way, and with groups the group scores may change.

    Args:
        model: model with `MoE` layers, or a layer, before `maxmoe.parallelize`. The experts may be quantized.
        experts: ids of the experts to remove, in every layer, or in some by their path, as in
            the statistics of `maxmoe.StatsAccumulator`.
        optimizer: optimizer of the model, whose state follows; None for one that is made afterwards.

    Raises:
        ValueError: for ids out of range, fewer experts left than `top_k`, groups that do not keep one size, and layers
            that are parallelized, have adapters or another router, or share their experts. No layer is changed then.
    """

    def remaining(path: str, num_experts: int, chosen: Any) -> _Sources:
        removed = {*_expert_ids(path, num_experts, chosen)}
        return [(expert,) for expert in range(num_experts) if expert not in removed]

    _replace(model, experts, remaining, optimizer)


def merge_experts(
    model: nn.Module,
    sets: Sequence[ExpertIds] | Mapping[str, Sequence[ExpertIds]],
    *,
    top_k: int | None = None,
    optimizer: Optimizer | None = None,
) -> None:
    """Merge each of several sets of experts into one expert, the mean of their matrices, biases and router rows.

    The merged expert has the place of the first expert of its set. Outputs change, unless the experts of a set are
    copies, every expert is in a set of m experts, and `top_k` becomes a m-th: the inverse of `duplicate_experts`.

    Args:
        model: model with `MoE` layers, or a layer, before `maxmoe.parallelize`, with experts that are not quantized.
        sets: disjoint sets of ids, such as ``[[0, 3], [1, 2, 5]]``, in every layer, or in some by their path.
        top_k: experts per token afterwards; None for the same number as before.
        optimizer: optimizer of the model, whose moments are averaged likewise.

    Raises:
        ValueError: as `prune_experts`, and for quantized experts and sets that are not within one group of the router.
    """

    def merged(path: str, num_experts: int, chosen: Any) -> _Sources:
        found = [tuple(_expert_ids(path, num_experts, ids)) for ids in _as_list(path, "sets", chosen)]
        if () in found:
            raise ValueError(f"{path}: each set must have at least one expert, got {found}")
        _expert_ids(path, num_experts, [expert for ids in found for expert in ids])  # the sets are disjoint
        set_of = {expert: ids for ids in found for expert in ids}
        return [*dict.fromkeys(set_of.get(expert, (expert,)) for expert in range(num_experts))]

    _replace(model, sets, merged, optimizer, top_k=top_k)


def duplicate_experts(
    model: nn.Module,
    experts: ExpertIds | Mapping[str, ExpertIds],
    *,
    top_k: int | None = None,
    noise: float = 0.0,
    optimizer: Optimizer | None = None,
) -> None:
    """Add copies of experts, with copies of their rows in the router.

    A copy comes right after its original. It has the same logits, so that a token that selects one selects the other
    next, in the place of another expert: outputs change. They are the same if every expert is copied m - 1 times and
    `top_k` becomes m * `top_k`; the weights of the copies then add up to the weight of the original. For scores that
    are neither normalized nor a softmax, `routed_scaling_factor` is divided by the growth of `top_k`. With "softmax" as
    both `score_function` and `normalization`, outputs change in any case.

    Args:
        model: model with `MoE` layers, or a layer, before `maxmoe.parallelize`. Without noise, the experts may be
            quantized.
        experts: ids of the experts to copy, in every layer, or in some by their path; an id may occur several times.
        top_k: experts per token afterwards; None for the same number as before.
        noise: standard deviation of Gaussian noise on the matrices and router rows of the copies, relative to the
            standard deviation of the matrix or row. Without noise, copies that are selected together get the same
            gradients and stay equal.
        optimizer: optimizer of the model, whose moments are copied.

    Raises:
        ValueError: as `prune_experts`, and for noise on quantized experts.

    Source: expert upcycling (arXiv:2604.19835) for copies with the same `top_k`.
    """

    def duplicated(path: str, num_experts: int, chosen: Any) -> _Sources:
        copies = _expert_ids(path, num_experts, chosen, unique=False)
        return [(expert,) for expert in sorted([*range(num_experts), *copies])]

    _replace(model, experts, duplicated, optimizer, top_k=top_k, noise=noise)


def _replace(
    model: nn.Module,
    chosen: Any,
    sources_of: Callable[[str, int, Any], _Sources],
    optimizer: Optimizer | None,
    *,
    top_k: int | None = None,
    noise: float = 0.0,
) -> None:
    """Replace experts; `sources_of` gives the sources of a layer from path, number of experts and what is chosen."""
    if top_k is not None:
        check_int("top_k", top_k, at_least=1)
    check_number("noise", noise, at_least=0)
    if not isinstance(optimizer, Optimizer | None):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    layers = _layers_of(model)
    in_layers = chosen if isinstance(chosen, Mapping) else dict.fromkeys(layers, chosen)
    for path in in_layers:
        if path not in layers:
            raise ValueError(f"{type(model).__name__} has no MoE layer {path!r}{nearest(path, layers)}")
        _check_layer(path, layers[path])
    _check_not_shared(layers, in_layers)
    replacements = [
        _Replacement.plan(path, layers[path], sources_of(path, layers[path].config.num_experts, each), top_k, noise)
        for path, each in in_layers.items()
    ]
    for replacement in replacements if optimizer is not None else ():
        replacement.check_gradients()
    for replacement in replacements:
        replacement.apply(optimizer)


# Parameters of router and experts that all experts share.
_OF_ALL_EXPERTS = ("scale",)


@dataclass(frozen=True)
class _Replacement:
    """New experts of a layer. `plan` checks everything that can fail, `apply` changes the layer."""

    path: str
    layer: MoE
    config: MoEConfig  # afterwards
    sources: _Sources  # in the order of the lowest ones
    noise: float  # standard deviation on copies, relative to the standard deviation of the matrix

    @classmethod
    def plan(cls, path: str, layer: MoE, sources: _Sources, top_k: int | None, noise: float) -> "_Replacement":
        """Return the replacement of the experts of a layer; raises before anything is changed."""
        config = layer.config
        quantized = [name for name, each in layer.experts.named_children() if isinstance(each, QuantizedWeight)]
        if quantized and (noise or any(len(ids) > 1 for ids in sources)):
            raise ValueError(
                f"{path}.experts.{quantized[0]} must be an ordinary tensor to be averaged or to get noise, got a "
                "quantized one: only prune_experts, and duplicate_experts without noise, keep codes and scales"
            )
        _check_groups(path, config, sources)
        changes: dict[str, Any] = {"num_experts": len(sources)}
        if top_k is not None:
            changes["top_k"] = top_k
            if config.normalization == "none" and config.score_function != "softmax":
                # The routing weights of copies then add up to the weight of the original.
                changes["routed_scaling_factor"] = config.routed_scaling_factor * config.top_k / top_k
        try:
            return cls(path, layer, dataclasses.replace(config, **changes), sources, noise)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @staticmethod
    def _of_experts(module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that have a row for each expert, by name."""
        return {key: each for key, each in module.named_parameters(recurse=False) if key not in _OF_ALL_EXPERTS}

    def check_gradients(self) -> None:
        """Raise for gradients if experts are merged or duplicated, because the new gradients are not known."""
        if len(set(self.sources)) == len(self.sources) and all(len(ids) == 1 for ids in self.sources):
            return
        for name in ("router", "experts"):
            for key, parameter in self._of_experts(self.layer.get_submodule(name)).items():
                if parameter.grad is not None:
                    raise ValueError(
                        f"{self.path}.{name}.{key} must have no gradient, because the gradient of merged or "
                        "duplicated experts is not known: call optimizer.step() before, and optimizer.zero_grad()"
                    )

    @torch.no_grad()
    def apply(self, optimizer: Optimizer | None) -> None:
        """Replace the experts, and their state in the optimizer."""
        for name, module in (("router", self.layer.router), ("experts", self.layer.experts)):
            for key, old in self._of_experts(module).items():
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
        """Return the rows of the new experts. Rows after the rows of the experts stay as they are."""
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
            layer.metrics_accumulator = layer.metrics_accumulator.resized(config.num_selectable_experts)


def _check_layer(path: str, layer: MoE) -> None:
    """Raise unless a layer has a `Router` and `Experts` of this library, in one process, without adapters."""
    check_whole("surgery", layer.state_dict(), prefix=f"{path}.")
    of_config = type(make_router(layer.config, device="meta"))
    for name, module, kind in (("router", layer.router, of_config), ("experts", layer.experts, Experts)):
        if type(module) is not kind:
            raise ValueError(
                f"{path}.{name} must be a maxmoe.nn.{kind.__name__}, got {type(module).__name__}: adapters must be "
                "merged or removed before, and surgery knows no other router"
            )
    if layer.config.router_rule.takes_ids == "tokens":
        raise ValueError(f"{path} must have a router without a table of experts for ids, got {layer.config.router}")
    if layer.runner.dispatcher != local_dispatcher(layer.config):
        raise ValueError(
            f"{path} must have the dispatcher of one process, got {type(layer.runner.dispatcher).__name__}: surgery "
            "comes before parallelize"
        )


def _check_not_shared(layers: Mapping[str, MoE], chosen: Collection[str]) -> None:
    """Raise if one of the chosen layers shares its router or its experts with another layer of the model."""
    found: dict[nn.Parameter, str] = {}
    for path, layer in layers.items():
        for parameter in (*layer.router.parameters(), *layer.experts.parameters()):
            other = found.setdefault(parameter, path)
            if other != path and (path in chosen or other in chosen):
                raise ValueError(f"{path} must not share its router and experts, got a parameter of {other}")


def _check_groups(path: str, config: MoEConfig, sources: _Sources) -> None:
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


def _layers_of(model: nn.Module) -> dict[str, MoE]:
    """Return the MoE layers of a model, by their paths in `StepStats.layers`."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "surgery comes before DistributedDataParallel, which reduces gradients of the parameters that are replaced"
        )
    modules = model.named_modules()
    layers = {unwrapped_path(model, path) or "moe": module for path, module in modules if isinstance(module, MoE)}
    if not layers:
        raise ValueError(f"{type(model).__name__} must have layers of type MoE, got none")
    return layers


def _as_list(path: str, name: str, values: Any) -> list[Any]:
    """Return the elements of a sequence, a tensor or an array; raises for anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        raise ValueError(f"{path}: {name} must be a sequence, got {values!r}")
    return list(values)


def _expert_ids(path: str, num_experts: int, experts: Any, *, unique: bool = True) -> list[int]:
    """Return ids of experts as integers; raises for one out of range, and for a repeated one if they are `unique`."""
    ids = _as_list(path, "experts", experts)
    for place, expert in enumerate(ids):
        is_id = hasattr(expert, "__index__") and not isinstance(expert, bool)
        if not is_id or not 0 <= index(expert) < num_experts:
            raise ValueError(f"{path}: experts must be integers in [0, num_experts ({num_experts})), got {expert!r}")
        ids[place] = index(expert)
    repeated = sorted({expert for expert in ids if ids.count(expert) > 1})
    if unique and repeated:
        raise ValueError(f"{path}: experts must be named once, got {repeated[0]} {ids.count(repeated[0])} times")
    return ids
