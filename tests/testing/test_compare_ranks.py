"""`compare_ranks` with started processes: arguments, errors, and messages for models that cannot be compared."""

import math
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maxmoe.ranks.failures import RankError
from maxmoe.testing import compare_ranks
from support.compared_models import Case, Model, alone, build, ddp, loss, make_batch, same_batch, whole_batch
from support.forked_comparison import compare
from support.parallel_by_hand import SumOfParts


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def fail_on_rank_1(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 1:
        raise KeyError("no such layer")
    return ddp(model)


def test_it_starts_processes() -> None:
    comparison = compare_ranks(build, ddp, make_batch, loss, num_ranks=2)
    assert comparison.equal and comparison.dtype == torch.float64 and comparison.num_ranks == 2
    wrong = compare_ranks(build, alone, make_batch, loss)
    with pytest.raises(AssertionError, match=r"(?s)^compare_ranks: different\. 2 ranks beside one process, float64"):
        wrong.raise_if_different()
    assert wrong.first_wrong is not None and wrong.first_wrong.name == "last.bias"
    assert not any("float32" in note for note in wrong.notes), wrong  # in float32 it is wrong, too
    with pytest.raises(RankError, match=r"(?s)^rank 1 of 2 failed first:\nTraceback.*KeyError: 'no such layer'"):
        compare_ranks(build, fail_on_rank_1, make_batch, loss)


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


def test_steps_need_an_update() -> None:
    with pytest.raises(ValueError, match=r"^2 steps need make_update, got None$"):
        compare_ranks(build, ddp, make_batch, loss, steps=2)


def of_a_notebook(model: nn.Module, batch: Any) -> None: ...


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


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(lambda model: None, 2), "ValueError: parallelize must return the model, got None"),
        (Case(ddp, 2, build=lambda: 3), "TypeError: build_model must return a torch.nn.Module, got int"),
        (
            Case(ddp, 2, make_update=lambda model: None, steps=2),  # type: ignore[arg-type, return-value]
            "TypeError: make_update must return a function, got NoneType",
        ),
        (
            Case(ddp, 2, loss=lambda model, batch: model(batch[0])[0]),
            r"ValueError: loss must return a scalar tensor, or a dict of them, got shape \(24, 5, 8\) for 'loss'",
        ),
        (
            Case(ddp, 2, loss=lambda model, batch: torch.ones(())),
            "ValueError: loss must depend on parameters that require a gradient, got one without a gradient",
        ),
        (Case(lambda model: "model", 2), "ValueError: parallelize must return the model, got str"),
        (Case(ddp, 2, loss=lambda model, batch: {}), "ValueError: loss must return .*, got an empty dict"),
        (
            Case(ddp, 2, step=lambda model, batch: 3.0),  # type: ignore[arg-type, return-value]
            "ValueError: step must return a scalar tensor, or a dict of them, got float for 'loss'",
        ),
        (
            Case(ddp, 2, build=lambda: nn.ParameterDict({"wave": torch.ones(2, dtype=torch.complex64)})),
            "TypeError: build_model must return a model without complex parameters, got wave",
        ),
        (
            Case(ddp, 2, make_batch=lambda rank, num_ranks: {"collate": lambda x: x}),
            "TypeError: make_batch must return what pickle can send to other processes: ",
        ),
    ],
)
def test_functions_that_return_something_else(case: Case, message: str) -> None:
    with pytest.raises(RankError, match=f"(?s)failed first:\nTraceback.*{message}"):
        compare(case, dtype=torch.float64)


def test_a_rank_that_hangs_is_an_error() -> None:
    def hang(model: nn.Module) -> nn.Module:
        if dist.get_rank() == 0:
            time.sleep(60)
        return model

    begin = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2 hung at:.*in hang"):
        compare(Case(hang, 2), timeout=3.0)
    assert time.monotonic() - begin < 20


def test_a_rank_that_ends_without_a_result_is_an_error() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank \d of 2 failed first:\nit died: exit code 0"):
        compare(Case(lambda model: os._exit(0), 2))


def test_a_random_model_is_told_apart() -> None:
    def with_noise() -> nn.Module:
        torch.manual_seed(0)
        model = Model()
        model.last.register_forward_hook(lambda _, inputs, output: output + torch.rand_like(output))
        return model

    comparison = compare(Case(ddp, 2, build=with_noise))
    assert comparison.verdict == "random" and not comparison.gradients
    assert comparison.culprits[0].startswith("last.bias: the gradient differs by ")
    assert "the model is random: two runs in one process differ" in str(comparison)


def test_a_model_with_other_values_on_other_ranks_is_told_apart() -> None:
    def build_partly_unseeded() -> nn.Module:
        model = build()
        nn.init.normal_(model.router.weight)  # type: ignore[union-attr, arg-type]
        torch.manual_seed(torch.initial_seed())
        return model

    def other_router(model: nn.Module) -> nn.Module:
        if dist.get_rank() == 1:
            nn.init.normal_(model.router.weight)  # type: ignore[union-attr, arg-type]
        return model

    assert compare(Case(ddp, 2, build=build_partly_unseeded)).equal
    comparison = compare(Case(other_router, 2))
    assert comparison.verdict == "different start" and len(comparison.culprits) == 1
    assert comparison.culprits[0].startswith("router.weight: rank 1 of 2 differ")
    assert "parameters differ before the first step" in str(comparison)


def test_parameters_of_other_names_and_shapes() -> None:
    def add_layer(model: nn.Module) -> nn.Module:
        model.more = nn.Linear(2, 2)
        wide = nn.Linear(8, 16).double()
        wide.forward = lambda x: x @ wide.weight[:8].mT  # type: ignore[method-assign]
        model.last = wide
        return model

    texts = compare(Case(add_layer, 2)).culprits
    assert "more.weight: rank 0 has it, one process does not." in texts
    assert "last.weight: has shape (16, 8) on ranks 0, 1, which does not fit into (8, 8)." in texts


def test_a_parameter_that_no_rank_has() -> None:
    def remove_layer(model: Any) -> nn.Module:
        last = model.last
        del model.last
        object.__setattr__(model, "last", last)
        return model

    comparison = compare(Case(remove_layer, 2))
    assert comparison.verdict == "different start"
    assert set(comparison.culprits) == {"last.weight: no rank has it.", "last.bias: no rank has it."}


def test_entries_that_no_rank_has() -> None:
    def keep_the_first_experts(model: Any) -> nn.Module:
        for name, parameter in list(model.experts.named_parameters()):
            setattr(model.experts, name, nn.Parameter(parameter.detach()[:4].clone()))
        model.experts.group = dist.group.WORLD
        return model

    comparison = compare(Case(keep_the_first_experts, 2))
    assert comparison.verdict == "different start"
    assert "experts.up: no rank has 256 of 512 entries." in comparison.culprits


class NoFloat64(Small):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise NotImplementedError("single precision only")
        return super().forward(x)


class NarrowNorm(Small):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).float()
        return self.last((hidden / hidden.square().mean(-1, keepdim=True).add(1e-6).sqrt()).to(x.dtype))


def without_float64(model: nn.Module) -> nn.Module:
    if next(model.parameters()).dtype == torch.float64:
        raise NotImplementedError("no float64 on ranks")
    return ddp(model)


def test_float32_where_float64_is_impossible() -> None:
    comparison = compare(Case(ddp, 2, loss=mean_square, build=NoFloat64))
    assert comparison.equal and comparison.dtype == torch.float32 and comparison.tolerance == 1e-4
    (note,) = (note for note in comparison.notes if "float64" in note)
    assert note.endswith("the model cannot run in float64: NotImplementedError: single precision only.")
    assert compare(Case(without_float64, 2, loss=mean_square, build=Small)).notes[0].startswith("Compared in float32")
    wrong = compare(Case(alone, 2, loss=mean_square, build=NoFloat64))
    assert wrong.first_wrong is not None and "missing reduction (mean)" in wrong.first_wrong.explanation


def test_parts_in_float32_widen_the_tolerance() -> None:
    comparison = compare(Case(ddp, 2, loss=mean_square, build=NarrowNorm))
    assert comparison.equal and comparison.dtype == torch.float64 and comparison.tolerance == 1e-4
    assert "The model computes in float32 in places, first in the function float." in comparison.notes


def test_a_loss_that_is_wrong_beside_right_gradients() -> None:
    def reported_loss(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        terms = loss(model, batch)
        torch.stack(list(terms.values())).sum().backward()
        return {name: 7 * term.detach() for name, term in terms.items()}

    comparison = compare(Case(ddp, 2, step=reported_loss), dtype=torch.float64)
    assert not comparison.equal and comparison.first_wrong is None
    assert comparison.loss[0].explanation == "neither the sum nor the mean over ranks: the mean is 7 times"


def test_tokens_that_no_rank_has() -> None:
    def first_half(rank: int, num_ranks: int) -> Any:
        x, target = whole_batch()
        return x[: len(x) // num_ranks], target[: len(x) // num_ranks]

    comparison = compare(Case(ddp, 2, make_batch=first_half), dtype=torch.float64)
    assert "No rank has 480 of 960 entries of the output[0] of one process." in comparison.notes


def test_a_wrong_forward_is_told() -> None:
    class Summed(nn.Module):
        """Adds the bias on every rank before the all-reduce."""

        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            count, rank = dist.get_world_size(), dist.get_rank()
            self.weight, self.bias = nn.Parameter(layer.weight.detach().chunk(count, 1)[rank].clone()), layer.bias

        def forward(self, x: Tensor) -> Tensor:
            part = x.chunk(dist.get_world_size(), -1)[dist.get_rank()]
            return SumOfParts.apply(part @ self.weight.mT + self.bias)

    def tensor_parallel(model: nn.Module) -> nn.Module:
        model.last = Summed(model.last)  # type: ignore[arg-type]
        return model

    case = Case(tensor_parallel, 2, loss=mean_square, build=Small, make_batch=same_batch)
    comparison = compare(case, dtype=torch.float64)
    assert [output.explanation for output in comparison.outputs] == ["differs"]
    assert str(comparison).splitlines()[1] == "The mistake is in the forward pass, first in the output of last."


def test_gradients_that_are_not_finite() -> None:
    def overflow(model: nn.Module) -> nn.Module:
        model.first.bias.register_hook(lambda gradient: gradient / 0)  # type: ignore[operator, union-attr]
        return ddp(model)

    first = compare(Case(overflow, 2, loss=mean_square, build=Small), dtype=torch.float64).first_wrong
    assert first is not None and (first.name, first.explanation) == ("first.bias", "not finite")


def test_the_report_shows_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # pytest-xdist sets it to the width of the terminal
    comparison = compare(Case(alone, 2, loss=mean_square, build=Small), dtype=torch.float64)
    lines = str(comparison).splitlines()
    assert lines[0] == "compare_ranks: different. 2 ranks beside one process, float64, tolerance 1e-09."
    assert lines[1].startswith("First wrong gradient, in the order of the backward: last.bias: missing reduction")
    assert lines[2] == "4 of 4 gradients are wrong, 4 of them in this way."
    row = next(line.split() for line in lines if line.startswith("last.bias"))
    assert row[3] == "|" and float(row[1]) == pytest.approx(comparison.gradients[0].one_process, rel=1e-5)
