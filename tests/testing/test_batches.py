"""Batches of any form are compared, explained and cut into micro-batches."""

import random
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe.testing.batches import have_same_tensors, micro_batches
from testing.compared_models import Case, compare, ddp, make_batch


class Fields(UserDict[str, Tensor]):
    """Such as the batches of tokenizers."""


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class Pair:
    inputs: Attributes
    targets: Fields


def test_batches_of_any_form() -> None:
    def make_pair(rank: int, num_ranks: int) -> Pair:
        inputs, targets = make_batch(rank, num_ranks)
        more = {"number": torch.ones(2)} if rank == 0 else {}
        return Pair(Attributes(x=inputs, **more), Fields(x=targets))

    def loss_that_pops(model: nn.Module, batch: Pair) -> dict[str, Tensor]:
        batch.inputs.x.mul_(1.5)  # type: ignore[attr-defined]
        output, aux_loss = model(batch.inputs.pop("x"))
        factor = dist.get_world_size() if dist.is_initialized() else 1
        return {"tokens": (output - batch.targets["x"]).square().mean(), "aux": aux_loss * factor}

    case = Case(ddp, 3, loss=loss_that_pops, make_batch=make_pair)
    first = compare(case, dtype=torch.float64).first_wrong
    assert first is not None and first.explanation == "the term 'aux' is 3 times: number of ranks"
    assert not have_same_tensors(make_pair(0, 2), make_pair(1, 2))
    assert not have_same_tensors([torch.ones(2)], [torch.ones(2, dtype=torch.int64)])
    parts = micro_batches(make_pair(0, 2), 3)
    assert [type(part.inputs) for part in parts] == [Attributes] * 3
    assert have_same_tensors(parts[1].targets, {"x": make_batch(0, 2)[1][4:8]})


def test_all_random_numbers_are_seeded() -> None:
    def make_random_batch(rank: int, num_ranks: int) -> Any:
        factor = float(np.random.rand()) + random.random()
        return [tensor * factor for tensor in make_batch(rank, num_ranks)]

    compare(Case(ddp, 2, make_batch=make_random_batch)).raise_if_different()
