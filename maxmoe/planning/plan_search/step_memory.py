"""Memory of a rank in a step, from that of the parts of its model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from maxmoe.planning.plan_search.model_parts import StageKind
from maxmoe.planning.plan_search.part_cost import PartMemory


def memory_of(blocks: Mapping[str, PartMemory], counts: Mapping[str, int], rest: Sequence[PartMemory]) -> PartMemory:
    """Return the memory of the blocks of a stage, or of the whole model, and of the parts before and after them."""
    parts = [(blocks[kind], count) for kind, count in counts.items()] + [(part, 1) for part in rest]

    def total(name: str) -> Tensor:
        return torch.stack([getattr(part, name) * count for part, count in parts]).sum(0)

    units = [torch.stack([blocks[kind].unit for kind in counts]).amax(0)] if counts else []
    return PartMemory(
        stored=total("stored"),
        unsharded=total("unsharded"),
        unit=torch.stack(units + [part.unit for part in rest]).sum(0),
        kept=total("kept"),
        recomputed=torch.stack([part.recomputed for part, _ in parts]).amax(0),
    )


def pipelined_memory(
    stages: Sequence[tuple[StageKind, PartMemory]], num_micro_batches: Tensor, message: Tensor
) -> Tensor:
    """Return the bytes of the largest rank with the schedule 1F1B and one stage per rank.

    Args:
        stages: kinds of stages, each with its memory.
        num_micro_batches: number of micro-batches of each mesh.
        message: bytes of the hidden states of a micro-batch, which a stage keeps until its backward.
    """
    num_stages = sum(kind.number for kind, _ in stages)
    memories = []
    for kind, memory in stages:
        in_flight = num_micro_batches.clamp(max=num_stages - kind.rank)
        saved = (memory.kept + (0 if kind.is_last else message)) * in_flight + memory.recomputed
        # The gradients of whole parameters, and the parameters that torch gathers ahead.
        memories.append(memory.stored + 2 * memory.unsharded + memory.unit + saved)
    return torch.stack(memories).amax(0)
