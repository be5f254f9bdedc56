"""What is known of a run besides its gradients: groups of ranks, sizes, and gradients of parts of batch and loss."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from maxmoe.testing.batches import batch_sizes, have_same_tensors, micro_batches
from maxmoe.testing.explanation import Gradients, Share, Sizes, fit
from maxmoe.testing.measurement import Measurement


def partitions(ranks: Sequence[Measurement]) -> dict[str, list[list[int]]]:
    """Return groups of ranks by name: the axes of meshes, other process groups, and all ranks."""
    found: dict[str, list[list[int]]] = {}
    for rank in ranks:
        for name, group in rank.groups.items():
            if len(group) > 1 and name != "default_pg":
                label = f"mesh axis {name[5:]!r}" if name.startswith("mesh_") else f"a group of {len(group)} ranks"
                groups = found.setdefault(label, [])
                if group not in groups:
                    groups.append(group)
    everyone = list(range(len(ranks)))
    return {"all ranks": [everyone]} | {name: groups for name, groups in found.items() if groups != [everyone]}


def sizes(one_process: Measurement, ranks: Sequence[Measurement]) -> Sizes:
    """Return the sizes that a factor may come from; a size of a rank that the whole has too is left out."""
    groups = {name: len(groups[0]) for name, groups in partitions(ranks).items() if name != "all ranks"}
    found = {"number of ranks": len(ranks), **groups, "micro-batches": _num_calls(one_process, ranks)}
    whole = dict(batch_sizes(one_process.batch))
    of_rank = {f"{name} of a rank": size for name, size in batch_sizes(ranks[0].batch) if size != whole.get(name)}
    return {name: size for name, size in (found | whole | of_rank).items() if size > 1}


def batches_of_shares(one_process: Measurement, ranks: Sequence[Measurement]) -> list[tuple[Share, Any]]:
    """Return the different micro-batches of all ranks; ranks with the same tokens share them."""
    found: list[tuple[list[int], Any]] = []
    for rank, measurement in enumerate(ranks):
        for holders, batch in found:
            if have_same_tensors(batch, measurement.batch):
                holders.append(rank)
                break
        else:
            found.append(([rank], measurement.batch))
    count = _num_calls(one_process, ranks)
    return [
        (Share(tuple(holders), number), micro_batch)
        for holders, batch in found
        for number, micro_batch in enumerate(micro_batches(batch, count))
    ]


def shared_masks(ranks: Sequence[Measurement]) -> list[str]:
    """Describe a pair of ranks with the same dropout masks for different tokens, and the other way round."""
    texts: dict[bool, str] = {}
    for first, second in itertools.combinations(range(len(ranks)), 2):
        one, other = ranks[first], ranks[second]
        has_same_masks = one.random_state == other.random_state
        if have_same_tensors(one.batch, other.batch) != has_same_masks:
            masks, tokens = ("equal", "different") if has_same_masks else ("different", "the same")
            text = f"Dropout masks of ranks {first} and {second} are {masks}, their tokens are {tokens}."
            texts.setdefault(has_same_masks, text)
    return list(texts.values())


def weights_of(shares: Sequence[Mapping[str, Gradients]], whole: Gradients, largest_error: float) -> list[float]:
    """Return the weights with which the gradients of the shares add up to the gradients of the whole batch, if any."""
    if len(shares) < 2:
        return []

    def flat(gradients: Gradients) -> Tensor:
        return torch.cat([gradients[name].flatten() for name in whole])

    columns = [torch.stack([flat(gradients) for gradients in terms.values()]).sum(0) for terms in shares]
    weights = fit(columns, flat(whole), largest_error)
    return weights if weights and all(abs(weight) > 1e-9 for weight in weights) else []


def _num_calls(one_process: Measurement, ranks: Sequence[Measurement]) -> int:
    """Return the number of forward calls on a rank for each in one process."""
    return max(len(rank.outputs) for rank in ranks) // max(len(one_process.outputs), 1)
