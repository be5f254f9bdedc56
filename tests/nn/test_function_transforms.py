"""Layers under torch.func.vmap and jvp and a second backward: as in a loop and as finite differences, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxmoe
from maxmoe import MoE, MoEFeedForward, StatsAccumulator
from support.operator_checks import ignore_warnings_of_transforms

BATCHES = torch.randn(2, 3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

pytestmark = ignore_warnings_of_transforms


def make(kind: type[MoE], **options: Any) -> Any:
    config = maxmoe.MoEConfig(hidden_size=6, intermediate_size=5, num_experts=4, top_k=2, **options)
    torch.manual_seed(0)
    return kind(config, dtype=torch.float64)


def outputs(layer: nn.Module) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Hidden states, and the auxiliary loss of a layer that returns it."""
    return lambda x: (out,) if isinstance(out := layer(x), Tensor) else out[:2]


def vmapped(layer: nn.Module) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = torch.func.vmap(outputs(layer))(BATCHES)
    return results


def pushed_forward(layer: nn.Module) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = torch.func.jvp(outputs(layer), (BATCHES,), (BATCHES,))[0]
    return results


def in_a_loop(layer: nn.Module) -> tuple[Tensor, ...]:
    return tuple(torch.stack(each) for each in zip(*map(outputs(layer), BATCHES), strict=True))


def at_once(layer: nn.Module) -> tuple[Tensor, ...]:
    return outputs(layer)(BATCHES)


each_transform = pytest.mark.parametrize(
    ("transformed", "plain"), [(vmapped, in_a_loop), (pushed_forward, at_once)], ids=["vmap", "jvp"]
)


def gradients(layer: nn.Module, run: Callable[[nn.Module], tuple[Tensor, ...]]) -> list[Tensor]:
    layer.zero_grad()
    torch.stack([result.sin().sum() for result in run(layer)]).sum().backward()
    return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


@each_transform
@pytest.mark.parametrize(("kind", "weight"), [(MoE, 0.1), (MoE, 0.0), (MoEFeedForward, 0.0)])
def test_gradients_are_those_of_plain_calls(kind: type[MoE], weight: float, transformed: Any, plain: Any) -> None:
    layer = make(kind, load_balance_loss_weight=weight)
    for one, other in zip(gradients(layer, transformed), gradients(layer, plain), strict=True):
        torch.testing.assert_close(one, other)


@each_transform
@pytest.mark.parametrize("loss", ["load_balance_loss_weight", "router_z_loss_weight"])
def test_a_loss_whose_gradient_would_be_lost(loss: str, transformed: Any, plain: Any) -> None:
    layer = make(MoEFeedForward, **{loss: 0.1})
    message = r"^MoEFeedForward: torch.func.vmap and jvp hide .*auxiliary loss would be lost: use maxmoe.MoE"
    with pytest.raises(NotImplementedError, match=message):
        transformed(layer)
    assert_runs_without_gradients(layer, transformed, plain)


@each_transform
@pytest.mark.parametrize("kind", [MoE, MoEFeedForward])
def test_a_call_that_would_not_be_counted(kind: type[MoE], transformed: Any, plain: Any) -> None:
    model = nn.Sequential(make(kind))
    accumulator = StatsAccumulator(model)
    with pytest.raises(NotImplementedError, match=r"^0: torch.func.vmap and jvp hide .*Accumulator would not count"):
        transformed(model)
    assert_runs_without_gradients(model, transformed, plain)
    assert not accumulator.update().layers["0"].tokens_per_expert.any()
    gradients(model, plain)
    assert accumulator.update().layers["0"].tokens_per_expert.sum() == 2 * BATCHES.shape[:-1].numel()


def assert_runs_without_gradients(layer: nn.Module, transformed: Any, plain: Any) -> None:
    with torch.no_grad():
        for one, other in zip(transformed(layer), plain(layer), strict=True):
            torch.testing.assert_close(one, other)
    layer.requires_grad_(False)
    for one, other in zip(transformed(layer), plain(layer), strict=True):
        torch.testing.assert_close(one, other)
    layer.requires_grad_()


def test_examples_with_different_numbers_of_rows() -> None:
    """Under padding: an error that says so; the dense implementation has no rows to count."""
    mask = torch.rand(BATCHES.shape[:-1], generator=torch.Generator().manual_seed(2)) < 0.6

    def call(layer: MoE) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, valid: layer(x, valid).hidden_states

    sparse, dense = (make(MoE, implementation=kind).requires_grad_(False) for kind in ("sparse", "dense"))
    with pytest.raises(NotImplementedError, match=r"^ragged_plan: the examples of torch.func.vmap .*dense"):
        torch.func.vmap(call(sparse))(BATCHES, mask)
    for layer, valid in ((sparse, mask[:1].expand_as(mask)), (dense, mask)):
        expected = torch.stack([call(layer)(x, one) for x, one in zip(BATCHES, valid, strict=True)])
        torch.testing.assert_close(torch.func.vmap(call(layer))(BATCHES, valid), expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek": {"score_function": "sigmoid", "score_correction_bias": True, "num_groups": 2, "top_k_groups": 1}
    | {"num_shared_experts": 1, "load_balance_loss_weight": 0.1},
    "gpt_oss": {"activation": "swigluoai", "activation_limit": 0.7, "expert_bias": True, "normalization": "softmax"},
}
STEP = 1e-6


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_derivatives_equal_finite_differences(path: str, options: dict[str, Any]) -> None:
    """Tangents of layers that are trained or frozen, and the gradient of a gradient penalty."""
    layer, (x, direction) = make(MoE, **options), BATCHES

    def penalty(x: Tensor, *parameters: Tensor) -> Tensor:
        out, aux_loss = outputs(layer)(x.requires_grad_())
        gradients = torch.autograd.grad(out.square().sum() + aux_loss, [x, *parameters], create_graph=True)
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum()

    for parameters in ((), tuple(layer.parameters())):
        (gradient,) = torch.autograd.grad(penalty(x, *parameters), x)
        above, below = (penalty((x + step * direction).detach(), *parameters) for step in (STEP, -STEP))
        torch.testing.assert_close((gradient * direction).sum(), (above - below) / (2 * STEP), rtol=1e-6, atol=1e-6)
    for trained in (True, False):
        _, tangents = torch.func.jvp(outputs(layer.requires_grad_(trained)), (x.detach(),), (direction,))
        with torch.no_grad():
            above, below = (outputs(layer)(x + step * direction) for step in (STEP, -STEP))
        for tangent, one, other in zip(tangents, above, below, strict=True):
            torch.testing.assert_close(tangent.detach(), (one - other) / (2 * STEP), rtol=1e-6, atol=1e-8)


def test_other_transforms_whose_gradient_would_be_lost() -> None:
    """Nested transforms, and an ensemble, whose batched parameters require a gradient outside of the transform."""
    layers = [make(MoEFeedForward, load_balance_loss_weight=0.1) for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(layers)  # type: ignore[arg-type]
    layer = layers[0]

    def of_state(*state: Any) -> Tensor:
        return torch.func.functional_call(layer, state, BATCHES[0])

    for call in (
        lambda: torch.func.vmap(torch.func.vmap(layer))(BATCHES[None]),
        lambda: torch.func.vmap(lambda x: torch.func.jvp(layer, (x,), (x,))[1])(BATCHES),
        lambda: torch.func.vmap(of_state)(parameters, buffers),
    ):
        with pytest.raises(NotImplementedError, match=r"torch.func.vmap and jvp hide"):
            call()
