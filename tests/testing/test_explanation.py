"""What `compare_ranks` compares and explains in models with odd values: zeros, small numbers, NaN, sparse gradients."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maxmoe.testing import RankComparison
from maxmoe.testing.comparison import compare_output
from maxmoe.testing.layout import Entries
from testing.compared_models import (
    BATCH,
    REPLICATED,
    WIDTH,
    Case,
    alone,
    build,
    build_feed_forward,
    compare,
    ddp,
    expert_parallel,
    loss,
    reduced,
    same_batch,
    share_of_loss,
    whole_batch,
)

MISSING = "missing reduction (mean) over all ranks: each rank has only its own gradient"


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


def explained(case: Case) -> RankComparison:
    """Compare in float64 alone: no test here reads the note about float32."""
    return compare(case, dtype=torch.float64)


def explanations(comparison: RankComparison) -> dict[str, str]:
    return {gradient.name: gradient.explanation for gradient in comparison.gradients if not gradient.equal}


def test_a_factor_beside_an_auxiliary_gradient() -> None:
    """A correct gradient that the backward adds does not hide the factor of the loss."""

    def share(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1]) * len(batch[0]) / BATCH

    found = explanations(explained(Case(ddp, loss=share, build=partial(build_feed_forward, "sequence"))))
    assert found["1.router.weight"] == "the loss is 0.25 times: 1 / number of ranks"
    assert found["1.experts.up_proj"] == "0.25 times: 1 / number of ranks"


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
    """Only the gradients tell which experts a rank has."""

    def build_equal() -> nn.Module:
        model: Any = build()
        nn.init.ones_(model.experts.up)
        return model

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

    case = Case(without_scale, 2, loss=mean_square, build=build)
    assert explanations(explained(case)) == {"scale": MISSING}

    def shifted(model: Any) -> nn.Module:
        model.scale.register_hook(lambda gradient: gradient + dist.get_rank() + 1)
        return model

    found = explanations(explained(case._replace(parallelize=shifted, make_batch=same_batch)))
    assert found["scale"].startswith("no single factor (cosine 0.99"), found


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


def test_a_loss_that_is_wrong_beside_right_gradients() -> None:
    def reported_loss(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        terms = loss(model, batch)
        torch.stack(list(terms.values())).sum().backward()
        return {name: 7 * term.detach() for name, term in terms.items()}

    def other_term(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"tokens": mean_square(model, batch), "other": torch.tensor(0.5 if dist.is_initialized() else 0.0)}

    wrong = "neither the sum nor the mean over ranks: the mean is"
    for case, name, how in (
        (Case(ddp, 2, step=reported_loss), "tokens", "7 times"),
        (Case(ddp, 2, loss=other_term), "other", "not zero"),
    ):
        comparison = explained(case)
        assert comparison.verdict == "different" and comparison.first_wrong is None
        assert {term.name: term.explanation for term in comparison.loss}[name] == f"{wrong} {how}"


def test_the_worst_of_several_calls_of_a_model_counts() -> None:
    whole = torch.arange(8.0).view(4, 2)
    parts = [whole[:2], whole[2:] + torch.eye(2)]  # gradients of two micro-batches
    assert compare_output(whole, [[Entries.of(part)] for part in parts]) == (1.0, 0)


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
        model.more.register_hook(lambda gradient: gradient / 0)
        return model

    def seven_times(model: Any) -> nn.Module:
        model.layer.bias.register_hook(lambda gradient: 7 * gradient)
        return ddp(model)

    comparison = explained(Case(seven_times, 2, loss=mean_square, build=infinite))
    assert explanations(comparison) == {"layer.bias": "7 times"}
    assert comparison.verdict == "not finite" and comparison.culprits == ("Infinite or NaN in one process: more.",)
    assert not explained(Case(ddp, 2, loss=lambda *of: mean_square(*of) * math.nan, build=lambda: Odd(forward))).equal


def test_gradients_that_are_zero() -> None:
    """The first factor of LoRA has a zero gradient as long as the second one is zero."""

    def forward(model: Any, x: Tensor) -> Tensor:
        model.num_samples += len(x)
        return model.layer(x) + x @ model.a.mT @ model.b.mT * model.waves.imag[0]

    def build_frozen() -> nn.Module:
        torch.manual_seed(1)
        model = Odd(forward, a=torch.randn(2, WIDTH), b=torch.zeros(WIDTH, 2), unused=torch.ones(2))
        model.register_buffer("scale", torch.ones(2))
        model.register_buffer("num_samples", torch.zeros((), dtype=torch.int64))
        model.register_buffer("waves", torch.full((2,), 1j))
        model.layer.bias.requires_grad_(False)
        return model

    def trained_without_a(model: Any) -> nn.Module:
        model.requires_grad_(True)._ddp_params_and_buffers_to_ignore = [".a", "scale"]
        model.layer.weight.requires_grad_(False)
        model.scale += dist.get_rank()
        return DistributedDataParallel(model, find_unused_parameters=True)

    comparison = explained(Case(trained_without_a, 2, loss=mean_square, build=build_frozen))
    assert explanations(comparison) == {
        "a": MISSING,
        "layer.weight": "frozen on the ranks: requires_grad is False",
        "layer.bias": "trained on the ranks, but frozen in one process",
    }
    assert "Gradients that are zero in one process, so that nothing is compared: unused." in comparison.notes
    assert "The buffer scale differs from one process before the step on rank 1." in comparison.notes
    assert "The buffer num_samples differs from one process after the step on rank 0, 1." in comparison.notes


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


def test_tokens_that_no_rank_has() -> None:
    def first_half(_rank: int, num_ranks: int) -> Any:
        return tuple(whole.chunk(num_ranks)[0] for whole in whole_batch())

    notes = explained(Case(ddp, 2, make_batch=first_half)).notes
    assert "No rank has 480 of 960 entries of the output[0] of one process." in notes
