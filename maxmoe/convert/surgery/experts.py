"""Operations that change the number of experts, and the layers and experts that they change."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from maxmoe.checks.fields import check_int, check_number, nearest
from maxmoe.convert.surgery.replacement import Replacement, Sources
from maxmoe.expert_load.stats_accumulator import unwrapped_path
from maxmoe.nn import MoE

# Ids of experts, integers or an integer tensor (N,).
ExpertIds: TypeAlias = Sequence[int] | Tensor


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

    def remaining(path: str, num_experts: int, chosen: Any) -> Sources:
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
        top_k: experts per token afterwards; None for as many as before.
        optimizer: optimizer of the model, whose moments are averaged likewise.

    Raises:
        ValueError: as `prune_experts`, and for quantized experts and sets that are not within one group of the router.
    """

    def merged(path: str, num_experts: int, chosen: Any) -> Sources:
        found = [tuple(_expert_ids(path, num_experts, ids)) for ids in _as_list(path, "sets", chosen)]
        if () in found:
            raise ValueError(f"{path}: sets must have experts, got {found}")
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
    `top_k` becomes m * `top_k`; the weights of the copies then add up to that of the original. For scores that are
    neither normalized nor a softmax, `routed_scaling_factor` is divided by the growth of `top_k`. With "softmax" as
    both `score_function` and `normalization`, outputs change in any case.

    Args:
        model: model with `MoE` layers, or a layer, before `maxmoe.parallelize`. Without noise, the experts may be
            quantized.
        experts: ids of the experts to copy, in every layer, or in some by their path; an id may occur several times.
        top_k: experts per token afterwards; None for as many as before.
        noise: standard deviation of Gaussian noise on the matrices and router rows of the copies, divided by that of
            the matrix or row. Without noise, copies that are selected together get the same gradients and stay equal.
        optimizer: optimizer of the model, whose moments are copied.

    Raises:
        ValueError: as `prune_experts`, and for noise on quantized experts.

    Source: expert upcycling (arXiv:2604.19835) for copies with the same `top_k`.
    """

    def duplicated(path: str, num_experts: int, chosen: Any) -> Sources:
        copies = _expert_ids(path, num_experts, chosen, unique=False)
        return [(expert,) for expert in sorted([*range(num_experts), *copies])]

    _replace(model, experts, duplicated, optimizer, top_k=top_k, noise=noise)


def _replace(
    model: nn.Module,
    chosen: Any,
    sources_of: Callable[[str, int, Any], Sources],
    optimizer: Optimizer | None,
    *,
    top_k: int | None = None,
    noise: float = 0.0,
) -> None:
    """Replace experts, after everything that can fail has been checked.

    Args:
        model: model with `MoE` layers, or a layer.
        chosen: experts in all layers, or in some by path.
        sources_of: function that returns the sources of a layer from its path, number of experts and chosen experts.
        optimizer: optimizer of the model, or None.
        top_k: experts per token afterwards; None for as many as before.
        noise: standard deviation of the noise on copies, divided by that of the matrix.
    """
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
    replacements = [
        Replacement.plan(path, layers[path], sources_of(path, layers[path].config.num_experts, each), top_k, noise)
        for path, each in in_layers.items()
    ]
    _check_not_shared(layers, in_layers)
    for replacement in replacements if optimizer is not None else ():
        replacement.check_gradients()
    for replacement in replacements:
        replacement.apply(optimizer)


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


def _check_not_shared(layers: Mapping[str, MoE], chosen: Iterable[str]) -> None:
    """Raise if the router or the experts of a chosen layer are those of another layer too."""
    found: dict[nn.Parameter, str] = {}
    for path, layer in layers.items():
        for parameter in (*layer.router.parameters(), *layer.experts.parameters()):
            other = found.setdefault(parameter, path)
            if other != path and {path, other} & {*chosen}:
                raise ValueError(f"{path} must have a router and experts of its own, got those of {other}")


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
