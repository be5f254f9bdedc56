"""The balance loss over an optimizer step: counts of all micro-batches and ranks, as in arXiv:2501.11873."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig
from support.run_ranks import run_cases, run_ranks

E, K, D, WEIGHT = 8, 2, 6, 0.5
BATCH, LENGTH = 8, 5


def make(scope: str = "step") -> MoE:
    torch.manual_seed(0)
    balance: Any = {"load_balance_loss_weight": WEIGHT, "load_balance_scope": scope}
    config = MoEConfig(hidden_size=D, intermediate_size=4, num_experts=E, top_k=K, **balance)
    return MoE(config, dtype=torch.float64)


def batch() -> Tensor:
    """Tokens whose sequences prefer different experts, so that the load of micro-batches differs."""
    generator = torch.Generator().manual_seed(1)
    mean = 2 * torch.randn(BATCH, 1, D, generator=generator, dtype=torch.float64)
    return mean + torch.randn(BATCH, LENGTH, D, generator=generator, dtype=torch.float64)


def mask() -> Tensor:
    return torch.arange(LENGTH) < torch.tensor([5, 3, 5, 1, 5, 4, 5, 2]).unsqueeze(1)


def by_definition(layer: MoE, x: Tensor, valid: Tensor, num_micro_batches: int) -> list[Tensor]:
    """The loss of each micro-batch, with the counts up to it."""
    losses, counts, num_tokens = [], torch.zeros(E, dtype=torch.float64), 0
    for part, keep in zip(x.chunk(num_micro_batches), valid.chunk(num_micro_batches), strict=True):
        tokens = part[keep]
        probabilities = (tokens @ layer.router.weight.T).softmax(1)
        chosen = probabilities.topk(K).indices
        counts = counts + torch.stack([(chosen == e).sum() for e in range(E)]).double()
        num_tokens += len(tokens)
        frequencies = E / (K * num_tokens) * counts
        losses.append(WEIGHT * (frequencies * probabilities.mean(0)).sum())
    return losses


def accumulated(
    layer: MoE,
    x: Tensor,
    valid: Tensor | None,
    num_micro_batches: int,
    forward: Callable[..., Any] | None = None,
) -> tuple[list[float], Tensor]:
    """Losses and the gradient of the router, of the mean over the micro-batches."""
    accumulator = maxmoe.StatsAccumulator(layer)
    layer.zero_grad()
    losses = []
    masks = [None] * num_micro_batches if valid is None else valid.chunk(num_micro_batches)
    for part, keep in zip(x.chunk(num_micro_batches), masks, strict=True):
        loss = (forward or layer)(part, keep)[1]  # aux_loss
        (loss / num_micro_batches).backward()
        losses.append(loss.item())
    accumulator.update()
    gradient = layer.router.weight.grad
    assert gradient is not None
    return losses, gradient.clone()


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_is_its_definition_also_if_recomputed(use_reentrant: bool | None) -> None:
    def forward(layer: MoE) -> Callable[..., Any]:
        if use_reentrant is None:
            return layer

        def call(x: Tensor, keep: Tensor) -> Any:
            return checkpoint(layer, x.detach().requires_grad_(), keep, use_reentrant=use_reentrant)

        return call

    layer, x = make(), batch()
    losses = by_definition(layer, x, mask(), 4)
    (expected,) = torch.autograd.grad(torch.stack(losses).mean(), layer.router.weight)
    got, gradient = accumulated(layer, x, mask(), 4, forward(layer))
    torch.testing.assert_close(got, [loss.item() for loss in losses], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_micro_batches_in_flight(order: list[int]) -> None:
    """As in a pipeline, recomputed or not: a backward has the counts of all earlier ones, and its loss is reported."""
    layer, x = make(), batch()
    parts = x.chunk(4)
    ordered = torch.cat([parts[index] for index in order])
    expected = torch.stack(by_definition(layer, ordered, torch.ones_like(mask()), 4)).mean()
    (gradient,) = torch.autograd.grad(expected, layer.router.weight)

    def recomputed(use_reentrant: bool) -> Callable[[Tensor], Any]:
        return lambda x: checkpoint(layer, x.clone().requires_grad_(), use_reentrant=use_reentrant)

    for forward in (layer, recomputed(use_reentrant=False), recomputed(use_reentrant=True)):
        accumulator = maxmoe.StatsAccumulator(layer)
        outputs = [forward(part) for part in parts]
        layer.zero_grad()
        for index in order:
            (0 * outputs[index][0].sum() + outputs[index][1] / 4).backward()
        torch.testing.assert_close(layer.router.weight.grad, gradient, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(accumulator.update().aux_loss, expected, rtol=1e-12, atol=0)
        for part in parts:  # one after the other
            output = forward(part)
            (output[0].sum() + output[1]).backward()
        in_turn = torch.stack(by_definition(layer, x, torch.ones_like(mask()), 4)).mean()
        torch.testing.assert_close(accumulator.update().aux_loss, in_turn, rtol=1e-12, atol=0)


def test_only_training_needs_an_accumulator() -> None:
    evaluated(make(), batch(), nullcontext)
    with pytest.raises(ValueError, match=r"'step' needs maxmoe.StatsAccumulator\(model\)"):
        make()(batch())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    layer, x = make(), batch()
    plain = accumulated(layer, x, None, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = accumulated(layer, x, None, 4, lambda part, _: compiled(part))
    torch.testing.assert_close(got[0], plain[0])
    torch.testing.assert_close(got[1], plain[1])


def test_ranks_of_ddp() -> None:
    """DDP averages the gradients, so each rank's loss has the counts of all ranks."""
    x = batch()
    losses, expected = accumulated(make(), x, None, 2)

    def check() -> None:
        layer = make()
        model = DistributedDataParallel(layer, find_unused_parameters=True)
        parts = [part.chunk(2)[dist.get_rank()] for part in x.chunk(2)]
        got, gradient = accumulated(layer, torch.cat(parts), None, 2, lambda part, _: model(part))
        mean = torch.tensor(got, dtype=torch.float64)
        dist.all_reduce(mean)
        torch.testing.assert_close((mean / 2).tolist(), losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)

    run_ranks(check, 2)


def evaluated(layer: MoE, x: Tensor, context: Callable[[], Any]) -> Any:
    layer.train(context is not nullcontext)  # with gradients, but not trained
    with context():
        output = layer(x)
    layer.train()
    return output


EVALUATIONS = [nullcontext, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("context", EVALUATIONS)
def test_an_evaluation_belongs_to_no_step(context: Callable[[], Any]) -> None:
    """An evaluation inside of a step has the loss of the scope "batch", and does not change later losses."""
    x = batch()
    layer = make()
    expected = make("batch")(x[:3]).aux_loss

    def with_evaluations(part: Tensor, _valid: Tensor | None) -> Any:
        torch.testing.assert_close(evaluated(layer, x[:3], context).aux_loss, expected, rtol=1e-13, atol=0)
        output = layer(part)
        evaluated(layer, x[3:], context)
        return output

    got, plain = accumulated(layer, x, None, 4, with_evaluations), accumulated(layer, x, None, 4)
    assert got[0] == plain[0] and torch.equal(got[1], plain[1])


def test_one_rank_of_ddp_evaluates_alone() -> None:
    """An evaluation neither waits for the other ranks nor takes part in their next forward."""
    x = batch()

    def check(context: Callable[[], Any]) -> None:
        losses = []
        for is_alone in (False, True):
            layer = make()
            maxmoe.StatsAccumulator(layer)
            model = DistributedDataParallel(layer, find_unused_parameters=True)
            for part in x.chunk(4):
                if is_alone and dist.get_rank() == 0:
                    evaluated(layer, x[:3], context)
                loss = model(part.chunk(2)[dist.get_rank()]).aux_loss
                loss.backward()
                losses.append(loss.item())
        assert losses[:4] == losses[4:]

    run_cases(check, 2, [(context,) for context in EVALUATIONS])
