"""`compare_ranks` of several steps: updates, and state that ranks keep between steps."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.compared_models import (
    REPLICATED,
    Case,
    Model,
    Terms,
    Update,
    alone,
    build,
    clipped,
    ddp,
    expert_parallel,
    fsdp2,
    loss,
    same_batch,
    share_of_loss,
)
from support.forked_comparison import compare
from support.parallel_by_hand import reduced

with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):  # a warning of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


def adamw(model: nn.Module) -> Update:
    return clipped(torch.optim.AdamW(model.parameters(), lr=1e-2), model)


def sgd(model: nn.Module) -> Update:
    return clipped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)


def zero(model: nn.Module) -> Update:
    """Each rank has the optimizer state of some parameters, and sends these parameters to the others."""
    if not dist.is_initialized():
        return adamw(model)
    return clipped(ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2), model)


@pytest.mark.parametrize(
    ("parallelize", "make_update"), [(ddp, adamw), (ddp, zero), (fsdp2, adamw)], ids=["DDP", "ZeRO", "FSDP2"]
)
def test_right_updates_are_equal(parallelize: Any, make_update: Any) -> None:
    comparison = compare(Case(parallelize, 2, make_update=make_update, steps=3))
    comparison.raise_if_different()
    assert str(comparison).startswith("compare_ranks: equal in 3 steps. 2 ranks beside one process, float64")


def local_norms(model: nn.Module) -> Update:
    """Each rank clips by the norm of its own parameters: right for replicas, wrong for experts."""
    return sgd(model)


def of_names(model: nn.Module) -> Update:
    """Weight decay of some parameters by names, to which DDP adds a prefix."""
    decayed = [parameter for name, parameter in model.named_parameters() if name.startswith("experts")]
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("experts")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return clipped(torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2), model)


def own_part(model: nn.Module) -> Update:
    """Each rank updates some of the parameters, without sending them to the others."""
    if not dist.is_initialized():
        return sgd(model)
    mine = [*model.parameters()][dist.get_rank() :: dist.get_world_size()]
    return clipped(torch.optim.SGD(mine, lr=0.1), model)


def never_cleared(model: nn.Module) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update() -> None:
        optimizer.step()
        if not dist.is_initialized():
            optimizer.zero_grad()

    return update


SUM = "missing reduction (sum) over all ranks: each rank has only its own update"
WRONG = {
    "norms of each rank's experts": (
        Case(expert_parallel, 2, reduced(*REPLICATED), share_of_loss, make_update=local_norms, steps=2),
        "last.bias",
        " times on rank 1",
        "update",
    ),
    "decay by names": (Case(ddp, 2, make_update=of_names, steps=2), "experts.down", "no single factor", "update"),
    "parts that are not sent": (Case(ddp, 2, make_update=own_part, steps=2), "last.bias", SUM, "update"),
    "gradients of the step before": (
        Case(ddp, 2, make_update=never_cleared, steps=2),
        "last.bias",
        "right, and the gradient of the step before",
        "gradient",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_updates_are_found(name: str) -> None:
    case, first_wrong, explanation, noun = WRONG[name]
    comparison = compare(case, dtype=torch.float64)
    assert comparison.verdict == "different" and comparison.first_wrong is not None, comparison
    found = comparison.first_wrong
    assert (found.name, comparison.noun) == (first_wrong, noun), comparison
    assert explanation in found.explanation, comparison
    where = "the update after step 1" if noun == "update" else "step 2"
    assert str(comparison).startswith(f"compare_ranks: different in {where}."), comparison


class WithDropout(Model):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.dropout(x))


def masks(comparison: Any) -> list[str]:
    return [note for note in comparison.notes if note.startswith("Dropout masks")]


def test_dropout_is_left_out_and_its_masks_are_compared() -> None:
    """Ranks with the same seed have the same masks (huggingface/transformers#31412)."""

    def seeded_by_rank(model: nn.Module) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return ddp(model)

    case = Case(ddp, 2, build=partial(build, WithDropout))
    comparison = compare(case)
    assert comparison.equal and "Compared without dropout." in comparison.notes
    assert masks(comparison) == ["Dropout masks of ranks 0 and 1 are equal, their tokens are different."]
    assert not masks(compare(case._replace(parallelize=seeded_by_rank)))
    of_same_tokens = case._replace(parallelize=seeded_by_rank, make_batch=same_batch)
    (text,) = masks(compare(of_same_tokens))
    assert text == "Dropout masks of ranks 0 and 1 are different, their tokens are the same."
    wrong = compare(case._replace(parallelize=alone), dtype=torch.float64).first_wrong
    assert wrong is not None and "missing reduction (mean)" in wrong.explanation


class Scaled(Model):
    """A model whose gradients overflow float32 with the first scale of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-117)


FACTOR = 1e4


def scaled_loss(model: Any, batch: Any) -> Terms:
    scaler = getattr(model, "module", model).scaler
    return {name: scaler.scale(FACTOR * term) for name, term in loss(model, batch).items()}


def scaled_sgd(model: Any) -> Update:
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1 / FACTOR), getattr(model, "module", model).scaler

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return update


def scale_of_each_rank(model: Any) -> Update:
    """Another rank has no overflow (pytorch/pytorch#136009)."""
    update = scaled_sgd(model)
    if dist.is_initialized() and dist.get_rank() == 1:
        model.module.scaler.set_backoff_factor(2.0**-116)
    return update


def test_a_scaler_that_skips_a_step() -> None:
    case = Case(ddp, 2, loss=scaled_loss, build=partial(build, Scaled), make_update=scaled_sgd, steps=3)
    comparison = compare(case, dtype=torch.float32)
    comparison.raise_if_different()
    assert "Updates that are zero in one process, so that nothing is compared: last.bias" in "\n".join(comparison.notes)
    wrong = compare(case._replace(make_update=scale_of_each_rank), dtype=torch.float32)
    assert (wrong.step, wrong.noun) == (2, "gradient")
    assert wrong.first_wrong is not None
    assert wrong.first_wrong.explanation.startswith("gradient of the tokens of rank 1: 2 times"), wrong
