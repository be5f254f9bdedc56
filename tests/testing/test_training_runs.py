"""`compare_ranks`: its arguments and errors, started processes, dtypes, dropout and scalers."""

import math
import re
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from maxmoe.ranks.failures import RankError
from maxmoe.testing import compare_ranks
from testing.compared_models import (
    Case,
    Dense,
    Model,
    Terms,
    Update,
    alone,
    build,
    compare,
    ddp,
    dense_loss,
    loss,
    make_batch,
    same_batch,
)


def fail_on_rank_1(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 1:
        raise KeyError("no such layer")
    return ddp(model)


def test_it_starts_processes() -> None:
    comparison = compare_ranks(build, ddp, make_batch, loss, num_ranks=2)
    assert comparison.equal and comparison.dtype == torch.float64 and comparison.num_ranks == 2
    wrong = compare_ranks(build, alone, make_batch, loss)
    report = r"(?s)^compare_ranks: different\. 2 ranks beside one process, float64.*"
    report += r"First wrong gradient, in the order of the backward: .*gradients are wrong, \d+ of them in this way"
    with pytest.raises(AssertionError, match=report):
        wrong.raise_if_different()
    assert wrong.first_wrong is not None and wrong.first_wrong.name == "last.bias"
    assert wrong.first_wrong.explanation.startswith("missing reduction (mean) over all ranks")
    assert not any("float32" in note for note in wrong.notes), wrong  # in float32 it is wrong, too
    with pytest.raises(RankError, match=r"(?s)^rank 1 of 2 failed first:\nTraceback.*KeyError: 'no such layer'"):
        compare_ranks(build, fail_on_rank_1, make_batch, loss)


def of_a_notebook(model: nn.Module, batch: Any) -> None: ...


def test_functions_must_be_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^parallelize must be a function of a module in a file, .* got <.*lambda"):
        compare_ranks(build, lambda model: model, make_batch, loss)
    with pytest.raises(TypeError, match=r"^loss must be a function, got float$"):
        compare_ranks(build, ddp, make_batch, 1.0)  # type: ignore[arg-type]
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # as in a notebook
    monkeypatch.setattr(of_a_notebook, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "of_a_notebook", of_a_notebook, raising=False)
    with pytest.raises(ValueError, match=r"^step must be a function of a module in a file, .* of_a_notebook"):
        compare_ranks(build, ddp, make_batch, loss, step=of_a_notebook)


@pytest.mark.parametrize(
    ("argument", "values", "message"),
    [
        ("num_ranks", (1, True, 2.5, "2"), "an int >= 2"),
        ("steps", (0, False, 1.5, "2"), "a positive int"),
        ("timeout", (0, -1.0, math.inf, "3"), "a finite float > 0.0"),
        ("tolerance", (0.0, 1.0, math.nan, "0.1"), "a number above 0 and below 1 or None"),
        ("dtype", (torch.int64, "float64"), "torch.float64, torch.float32, torch.float16, torch.bfloat16 or None"),
    ],
)
def test_arguments(argument: str, values: tuple[Any, ...], message: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{argument} must be {message}, got {re.escape(repr(value))}$"):
            compare_ranks(build, ddp, make_batch, loss, **{argument: value})
    with pytest.raises(ValueError, match=r"^2 steps need make_update, got None$"):
        compare_ranks(build, ddp, make_batch, loss, steps=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parallelize": lambda model: None}, "ValueError: parallelize must return the model, got None"),
        ({"build": lambda: 3}, "TypeError: build_model must return a torch.nn.Module, got int"),
        (
            {"build": lambda: nn.ParameterDict({"wave": torch.ones(2, dtype=torch.complex64)})},
            "TypeError: build_model must return a model without complex parameters, got wave",
        ),
        (
            {"make_update": lambda model: None, "steps": 2},
            "TypeError: make_update must return a function, got NoneType",
        ),
        (
            {"loss": lambda model, batch: model(batch[0])[0]},
            r"ValueError: loss must return a scalar tensor, or a dict of them, got shape \(24, 5, 8\) for 'loss'",
        ),
        ({"loss": lambda model, batch: {}}, "ValueError: loss must return .*, got an empty dict"),
        (
            {"loss": lambda model, batch: torch.ones(())},
            "ValueError: loss must depend on parameters that require a gradient, got one without a gradient",
        ),
        (
            {"step": lambda model, batch: 3.0},
            "ValueError: step must return a scalar tensor, or a dict of them, got float for 'loss'",
        ),
        (
            {"make_batch": lambda rank, num_ranks: {"collate": lambda x: x}},
            "TypeError: make_batch must return what pickle can send to other processes: ",
        ),
    ],
)
def test_functions_that_return_something_else(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=f"(?s)failed first:\nTraceback.*{message}"):
        compare(Case(ddp, 2)._replace(**changed), dtype=torch.float64)


def test_a_rank_that_hangs_is_an_error() -> None:
    def hang(model: nn.Module) -> nn.Module:
        if dist.get_rank() == 0:
            time.sleep(1000)
        return model

    with pytest.raises(RankError, match=r"(?s)rank 0 of 2 hung at:.*in hang"):
        compare(Case(hang, 2), timeout=5.0)


class NoFloat64(Dense):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise NotImplementedError("single precision only")
        return super().forward(x)


class NarrowNorm(Dense):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)).float()
        return self.down((hidden / hidden.square().mean(-1, keepdim=True).add(1e-6).sqrt()).to(x.dtype))


def without_float64(model: nn.Module) -> nn.Module:
    if next(model.parameters()).dtype == torch.float64:
        raise NotImplementedError("no float64 on ranks")
    return ddp(model)


def test_float32_where_float64_is_impossible() -> None:
    case = Case(ddp, 2, loss=dense_loss, build=partial(build, NoFloat64))
    comparison = compare(case)
    assert comparison.equal and comparison.dtype == torch.float32 and comparison.tolerance == 1e-4
    (note,) = (note for note in comparison.notes if "float64" in note)
    assert note.endswith("the model cannot run in float64: NotImplementedError: single precision only.")
    assert compare(Case(without_float64, 2)).notes[0].startswith("Compared in float32")
    wrong = compare(case._replace(parallelize=alone))
    assert wrong.first_wrong is not None and "missing reduction (mean)" in wrong.first_wrong.explanation


def test_parts_in_float32_widen_the_tolerance() -> None:
    comparison = compare(Case(ddp, 2, loss=dense_loss, build=partial(build, NarrowNorm)))
    assert comparison.equal and comparison.dtype == torch.float64 and comparison.tolerance == 1e-4
    assert "The model computes in float32 in places, first in the function float." in comparison.notes


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_what_is_right_in_float32_alone() -> None:
    """FSDP2 of torch 2.13 divides gradients twice in float64 if its group has one rank."""

    def divided(model: nn.Module) -> nn.Module:
        meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "expert"))
        fully_shard(model, mesh=meshes["shard"])
        model.set_gradient_divide_factor(2.0)  # type: ignore[operator]
        return model

    def step(model: nn.Module, batch: Any) -> None:
        (2 * dense_loss(model, batch)).backward()

    comparison = compare(Case(divided, 2, step, dense_loss, same_batch, partial(build, Dense)))
    assert {gradient.explanation for gradient in comparison.gradients} == {"0.5 times: 1 / number of ranks"}
    assert comparison.notes[-1].startswith("All are equal in float32")


class WithDropout(Model):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.dropout(x))


def test_dropout_is_left_out_and_its_masks_are_compared() -> None:
    """Ranks with the same seed have the same masks (huggingface/transformers#31412)."""

    def seeded_by_rank(model: nn.Module) -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return ddp(model)

    same_seed = Case(ddp, 2, build=partial(build, WithDropout))
    other_seeds = same_seed._replace(parallelize=seeded_by_rank)
    for case, masks in (
        (same_seed, ["Dropout masks of ranks 0 and 1 are equal, their tokens are different."]),
        (other_seeds, []),
        (
            other_seeds._replace(make_batch=same_batch),
            ["Dropout masks of ranks 0 and 1 are different, their tokens are the same."],
        ),
    ):
        comparison = compare(case)
        assert comparison.equal and "Compared without dropout." in comparison.notes
        assert [note for note in comparison.notes if note.startswith("Dropout masks")] == masks
    wrong = compare(same_seed._replace(parallelize=alone), dtype=torch.float64).first_wrong
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
    assert str(comparison).startswith("compare_ranks: equal in 3 steps. 2 ranks beside one process, float32")
    assert "Updates that are zero in one process, so that nothing is compared: last.bias" in "\n".join(comparison.notes)
    wrong = compare(case._replace(make_update=scale_of_each_rank), dtype=torch.float32)
    assert (wrong.step, wrong.noun) == (2, "gradient")
    assert wrong.first_wrong is not None
    assert wrong.first_wrong.explanation.startswith("gradient of the tokens of rank 1: 2 times"), wrong
