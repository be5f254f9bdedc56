"""Operations that change the number of experts."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from maxmoe.checks.fields import check_int, check_number
from maxmoe.convert.surgery.replacement import Replacement
from maxmoe.convert.surgery.selection import (
    ExpertIds,
    Layers,
    as_list,
    check_not_shared,
    check_optimizer,
    expert_ids,
    layers_of,
)


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
    replacements = []
    selected: Layers[ExpertIds] = layers_of(model, experts)
    for path, (layer, chosen) in selected.items():
        removed = {*expert_ids(path, layer, chosen)}
        sources = [(expert,) for expert in range(layer.config.num_experts) if expert not in removed]
        replacements.append(Replacement.plan(path, layer, sources))
    _apply(model, replacements, optimizer)


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
    _check_top_k(top_k)
    replacements = []
    selected: Layers[Sequence[ExpertIds]] = layers_of(model, sets)
    for path, (layer, chosen) in selected.items():
        merged = [tuple(expert_ids(path, layer, ids)) for ids in as_list(path, "sets", chosen)]
        if () in merged:
            raise ValueError(f"{path}: sets must have experts, got {merged}")
        expert_ids(path, layer, [expert for ids in merged for expert in ids])  # the sets are disjoint
        set_of = {expert: ids for ids in merged for expert in ids}
        sources = {set_of.get(expert, (expert,)): None for expert in range(layer.config.num_experts)}
        replacements.append(Replacement.plan(path, layer, list(sources), top_k=top_k))
    _apply(model, replacements, optimizer)


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
    _check_top_k(top_k)
    check_number("noise", noise, at_least=0)
    replacements = []
    selected: Layers[ExpertIds] = layers_of(model, experts)
    for path, (layer, chosen) in selected.items():
        ids = expert_ids(path, layer, chosen, unique=False)
        sources = [(expert,) for expert in sorted([*range(layer.config.num_experts), *ids])]
        replacements.append(Replacement.plan(path, layer, sources, top_k=top_k, noise=noise))
    _apply(model, replacements, optimizer)


def _check_top_k(top_k: int | None) -> None:
    if top_k is not None:
        check_int("top_k", top_k, at_least=1)


def _apply(model: nn.Module, replacements: Sequence[Replacement], optimizer: Optimizer | None) -> None:
    check_not_shared(model, [replacement.path for replacement in replacements])
    if optimizer is not None:
        check_optimizer(optimizer)
        for replacement in replacements:
            replacement.check_gradients()
    for replacement in replacements:
        replacement.apply(optimizer)
