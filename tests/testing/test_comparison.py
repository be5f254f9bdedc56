"""`compare_ranks` says "equal" of right training on several ranks, and finds mistakes by name and factor."""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maxmoe.testing import Comparison, RankComparison
from maxmoe.testing.comparison import compare_output
from maxmoe.testing.layout import Entries, matching_names
from support import context_parallelism_of_torch, stages_of_torch
from support.compared_models import (
    REPLICATED,
    WIDTH,
    Case,
    alone,
    build,
    ddp,
    expert_parallel,
    same_batch,
    share_of_loss,
    whole_batch,
)
from support.forked_comparison import compare
from support.parallel_by_hand import Dense, SumOfParts, dense_loss, reduced
from support.right_training import RIGHT, build_equal
from support.sampling import by_default
from support.wrong_training import WRONG

# One of each kind of parallelism; the other tests of this folder compare more of them, and experts on two mesh axes.
RIGHT_BY_DEFAULT = {
    "DDP, sequences dealt in turn",
    "DDP, micro-batches without reduction",
    "DDP, tied weights",
    "FSDP2, recomputation",
    "FSDP2 with replicas",
    "sequence parallel",
    "tensor parallel by hand",
    "expert and data parallel by hand",
    "ScheduleDualPipeV",
    "Schedule1F1B with DDP",
    "ring attention of torch, balanced",
}

RIGHT |= stages_of_torch.RIGHT | context_parallelism_of_torch.RIGHT
WRONG |= stages_of_torch.WRONG
if os.environ.get("MAXMOE_CORE") != "off":  # as in tests/package/test_without_core.py
    from support import training_of_maxmoe

    RIGHT |= training_of_maxmoe.RIGHT
    RIGHT_BY_DEFAULT |= {"stages of maxmoe"}
    WRONG |= training_of_maxmoe.WRONG

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")


@pytest.mark.parametrize("name", by_default(RIGHT, RIGHT_BY_DEFAULT))
def test_right_training_is_equal(name: str) -> None:
    comparison = compare(RIGHT[name])
    comparison.raise_if_different()
    assert all(gradient.error < 1e-12 for gradient in comparison.gradients)
    assert comparison.loss and comparison.gradients


def explained(case: Case) -> RankComparison:
    """Differences are not compared in float32 again, because no test here reads the note about it."""
    return compare(case, dtype=torch.float64)


# Other tests of this folder, or other cases, have these explanations, or longer ones that contain them.
EXPLAINED_ELSEWHERE = {
    "gradients summed instead of averaged",
    "router not reduced",
    "gradients averaged instead of summed",
    "no reduction",
    "auxiliary loss times ranks",
    "loss not divided by micro-batches",
    "frozen experts",
    "norm without a graph",
    "all-reduce before replicated use",
    "ScheduleInterleavedZeroBubble with DDP",
    "ScheduleZBVZeroBubble with DDP",
    "scale of the auxiliary loss forgotten",
    "auxiliary gradient of each rank summed",
    "auxiliary loss of each rank's tokens",
}


@pytest.mark.parametrize("name", by_default(WRONG, [name for name in WRONG if name not in EXPLAINED_ELSEWHERE]))
def test_mistakes_are_found_by_name_and_factor(name: str) -> None:
    comparison = explained(WRONG[name])
    first = comparison.first_wrong
    assert comparison.verdict == "different" and first is not None, comparison
    assert first.explanation == WRONG[name].explanation, comparison
    assert first.name == (WRONG[name].first_wrong or comparison.gradients[0].name), comparison


def test_a_mean_beside_an_auxiliary_gradient() -> None:
    """A correct gradient that the backward adds does not hide the factor of the loss."""
    training = pytest.importorskip(
        "support.training_of_maxmoe", reason="MAXMOE_CORE=off: it needs a layer", exc_type=ImportError
    )
    build = partial(training.build_feed_forward, "sequence")
    found = explained(Case(ddp, loss=training.share_of_tokens, build=build))
    assert explanations(found)["1.router.weight"] == "the loss is 0.25 times: 1 / number of ranks"
    assert explanations(found)["1.experts.up_proj"] == "0.25 times: 1 / number of ranks"


class Odd(nn.Module):
    """A linear layer, and parameters that a test uses in `forward`."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parameters: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.compute = forward
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def explanations(comparison: RankComparison) -> dict[str, str]:
    return {gradient.name: gradient.explanation for gradient in comparison.gradients if not gradient.equal}


def test_gradients_that_are_small() -> None:
    """Errors that are small beside the largest gradient, in a model with an operator in float32."""

    def forward(model: Any, x: Tensor) -> Tensor:
        small = model.tripled.float().square().sum() + model.frozen.square().sum() + model.right.square().sum()
        noise = 1e-12 * model.noise.square().sum()
        return model.layer(x).float().log_softmax(-1).square().sum(-1) * 1e4 + 1e-4 * small + noise

    def build() -> nn.Module:
        return Odd(forward, noise=torch.rand(8), **{name: torch.rand(8) for name in ("tripled", "frozen", "right")})

    def mistakes(model: Any) -> nn.Module:
        model.tripled.register_hook(lambda gradient: 3 * gradient)
        model.noise.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
        model.frozen.requires_grad_(False)
        return ddp(model)

    comparison = compare(Case(mistakes, 2, build=build, loss=lambda model, batch: model(batch[0]).mean()))
    assert explanations(comparison) == {"frozen": "frozen on the ranks: requires_grad is False"}, comparison
    assert "Gradients that are too small to be told from rounding: noise, tripled." in comparison.notes


def test_gradients_of_other_experts_with_equal_values() -> None:
    def exchanged(model: Any) -> nn.Module:
        def of_other_rank(gradient: Tensor) -> Tensor:
            gradients = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(gradients, gradient.contiguous())
            return gradients[1 - dist.get_rank()]

        model = expert_parallel(model)
        model.experts.up.register_hook(of_other_rank)
        return model

    def ones_again(model: Any) -> nn.Module:
        nn.init.ones_(model.experts.up)
        return expert_parallel(model)

    case = Case(exchanged, 2, reduced(*REPLICATED), share_of_loss, build=build_equal)
    assert list(explanations(explained(case))) == ["experts.up"]
    comparison = compare(case._replace(parallelize=ones_again))
    assert comparison.equal, comparison
    (note,) = (note for note in comparison.notes if "equal values" in note)
    assert note.endswith("each matched to the place with the closest gradient: experts.up.")


def test_numbers_and_sparse_gradients() -> None:
    def build() -> nn.Module:
        def forward(model: Any, x: Tensor) -> Tensor:
            return model.scale * model.layer(model.embedding((x[..., 0] > 0).long()))

        model = Odd(forward, scale=torch.tensor(2.0))
        model.embedding = nn.Embedding(2, WIDTH, sparse=True)
        return model

    def without_scale(model: Any) -> nn.Module:
        model._ddp_params_and_buffers_to_ignore = [".scale"]
        return ddp(model)

    missing = "missing reduction (mean) over all ranks: each rank has only its own gradient"
    comparison = explained(Case(without_scale, 2, loss=mean_square, build=build))
    assert explanations(comparison) == {"scale": missing}, comparison

    def shifted(model: Any) -> nn.Module:
        model.scale.register_hook(lambda gradient: gradient + dist.get_rank() + 1)
        return model

    comparison = explained(Case(shifted, 2, loss=mean_square, build=build, make_batch=same_batch))
    assert explanations(comparison)["scale"].startswith("no single factor (cosine 0.99"), comparison


def test_a_loss_and_outputs_that_are_zero_up_to_rounding() -> None:
    def centered(rank: int, num_ranks: int) -> Any:
        x, target = whole_batch()
        advantages = target[:, 0, 0] - target[:, 0, 0].double().mean()
        return x.chunk(num_ranks)[rank], (advantages.double() - advantages.double().mean()).chunk(num_ranks)[rank]

    def policy_loss(model: nn.Module, batch: Any) -> Tensor:
        log_probabilities = model(batch[0])[0].log_softmax(-1)[:, 0, 0]
        return ((log_probabilities - log_probabilities.detach()).exp() * batch[1]).mean()

    def forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = model.layer(x)
        return y, (y * (3 if dist.is_initialized() else 1)).log_softmax(-1).exp().sum(-1) - 1

    compare(Case(ddp, 2, loss=policy_loss, build=lambda: Odd(forward), make_batch=centered)).raise_if_different()


def test_the_worst_of_several_calls_of_a_model_counts() -> None:
    whole = torch.arange(8.0).view(4, 2)
    parts = [whole[:2], whole[2:] + torch.eye(2)]  # gradients of two micro-batches
    assert compare_output(whole, [[Entries.of(part)] for part in parts]) == (1.0, 0)


def test_a_term_of_the_loss_that_is_zero() -> None:
    def terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"tokens": mean_square(model, batch), "other": torch.tensor(0.5 if dist.is_initialized() else 0.0)}

    comparison = explained(Case(ddp, 2, loss=terms))
    (other,) = (term for term in comparison.loss if not term.equal)
    assert (other.name, other.explanation) == ("other", "neither the sum nor the mean over ranks: the mean is not zero")


class RowParallel(Dense):
    """`down` computes its rows of the weight; the model sums the outputs of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.head(SumOfParts.apply(y) if dist.is_initialized() else y)


def test_the_module_in_which_a_forward_goes_wrong() -> None:
    """A row-parallel layer adds its bias on every rank. Summands, and what a right module does within, are right."""

    def row_parallel(model: Any) -> nn.Module:
        rank, count = dist.get_rank(), dist.get_world_size()
        for layer, name, dim in ((model.up, "weight", 0), (model.up, "bias", 0), (model.down, "weight", 1)):
            setattr(layer, name, nn.Parameter(getattr(layer, name).detach().chunk(count, dim)[rank].clone()))
        return model

    def right(model: Any) -> Any:
        row_parallel(model).down.register_forward_hook(lambda layer, _, y: y - layer.bias * dist.get_rank())
        return model

    def wrong_head(model: Any) -> nn.Module:
        right(model).head[1].register_forward_hook(lambda _layer, _x, y: 2 * y)
        return model

    def wrong_model(model: Any) -> nn.Module:
        right(model).head[0].register_forward_hook(lambda _layer, _x, y: 2 * y)
        model.head[1].register_forward_pre_hook(lambda _layer, x: x[0] / 2)
        model.register_forward_hook(lambda _layer, _x, y: 2 * y)
        return model

    case = Case(right, 2, loss=dense_loss, build=partial(build, RowParallel), make_batch=same_batch)
    assert explained(case).first_wrong_module == ""
    for parallelize, module in ((row_parallel, "down"), (wrong_head, "head.1"), (wrong_model, "")):
        found = explained(case._replace(parallelize=parallelize))
        assert found.first_wrong_module == module, found
        named = f", first in the output of {module}." if module else ": output differs."
        assert str(found).splitlines()[1] == f"The mistake is in the forward pass{named}"


def test_what_is_not_finite() -> None:
    def forward(model: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = model.layer(x)
        masked = y.detach().clone()
        masked[..., 0], masked[..., 1] = -math.inf, math.nan
        return y, masked, masked * (3 if dist.is_initialized() else 1)

    comparison = explained(Case(ddp, 2, loss=mean_square, build=lambda: Odd(forward)))
    assert [output.explanation for output in comparison.outputs] == ["", "", "differs"], comparison
    assert comparison.verdict == "different" and not explanations(comparison)

    def infinite() -> nn.Module:
        model = Odd(lambda model, x: model.layer(x) + model.more, more=torch.rand(WIDTH))
        model.more.register_hook(lambda gradient: gradient / 0)  # type: ignore[operator, union-attr]
        return model

    def seven_times(model: Any) -> nn.Module:
        model.layer.bias.register_hook(lambda gradient: 7 * gradient)
        return ddp(model)

    comparison = explained(Case(seven_times, 2, loss=mean_square, build=infinite))
    assert explanations(comparison) == {"layer.bias": "7 times"}
    assert comparison.verdict == "not finite" and comparison.culprits == ("Infinite or NaN in one process: more.",)
    assert not explained(Case(ddp, 2, loss=lambda *of: mean_square(*of) * math.nan, build=lambda: Odd(forward))).equal


def forward_that_counts(model: Any, x: Tensor) -> Tensor:
    model.num_samples += len(x)
    y: Tensor = model.layer(x) + x @ model.a.mT @ model.b.mT * model.waves.imag[0]
    return y


def test_gradients_that_are_zero() -> None:
    """The first factor of LoRA has a zero gradient as long as the second one is zero."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        factors = {"a": torch.randn(2, WIDTH), "b": torch.zeros(WIDTH, 2), "unused": torch.ones(2)}
        model = Odd(forward_that_counts, **factors)
        model.register_buffer("scale", torch.ones(2))
        model.register_buffer("num_samples", torch.zeros((), dtype=torch.int64))
        model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        model.register_buffer("waves", torch.full((2,), 1j))
        return model

    def without_a(model: Any) -> nn.Module:
        model._ddp_params_and_buffers_to_ignore = [".a", "scale"]
        model.layer.weight.requires_grad_(False)
        model.scale += dist.get_rank()
        return DistributedDataParallel(model, find_unused_parameters=True)

    def build_frozen() -> nn.Module:
        model: Any = build()
        model.layer.bias.requires_grad_(False)
        return model

    def trained(model: Any) -> nn.Module:
        return without_a(model.requires_grad_(True))

    comparison = explained(Case(trained, 2, loss=mean_square, build=build_frozen))
    assert explanations(comparison) == {
        "a": "missing reduction (mean) over all ranks: each rank has only its own gradient",
        "layer.weight": "frozen on the ranks: requires_grad is False",
        "layer.bias": "trained on the ranks, but frozen in one process",
    }
    assert "Gradients that are zero in one process, so that nothing is compared: unused." in comparison.notes
    assert "The buffer scale differs from one process before the step on rank 1." in comparison.notes
    assert "The buffer num_samples differs from one process after the step on rank 0, 1." in comparison.notes


def test_names_of_wrappers() -> None:
    assert matching_names(["module.module.w"], ["module.w"]) == {"module.module.w": "module.w"}
    assert matching_names(["module._orig_mod.w"], ["_orig_mod.w"]) == {"module._orig_mod.w": "_orig_mod.w"}
    assert matching_names(["module.more"], ["w"]) == {"module.more": "more"}


def test_a_table_without_a_loss() -> None:
    gradient = Comparison("layer.weight", 0.0, 1.0, (1.0,))
    assert "layer.weight" in str(RankComparison("equal", 2, torch.float64, 1e-9, gradients=(gradient,)))


def test_a_step_without_gradients() -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": mean_square(model, batch).detach(), "more": torch.ones(())}

    def narrow_on_ranks(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model.layer(x)
        return y.bfloat16() if dist.is_initialized() else y

    comparison = explained(Case(alone, 2, step, mean_square, build=lambda: Odd(narrow_on_ranks)))
    assert set(explanations(comparison).values()) == {"detached on the ranks: no gradient"}
    notes = "\n".join(comparison.notes)
    assert "No parameter has a gradient on any rank: step must run the backward, and no zero_grad after it." in notes
    assert "The term 'more' of the loss is not compared: one process does not return it." in notes
    assert "The output is bfloat16 on the ranks, float64 in one process." in notes
