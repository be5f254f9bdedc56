"""StatsAccumulator: each forward of a step counts once, evaluations do not count, and all ranks agree."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import functorch.compile  # noqa: F401  torch.compile imports it at its first use: once, where ranks are forked
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEFeedForward, MoEOutput, StatsAccumulator
from support.moe_layers import DEEPSEEK, make, tokens
from support.operator_checks import compile_whole
from support.run_ranks import run_cases, run_ranks

OPTIONS = {**DEEPSEEK, "num_experts": 12, "correction_bias_update_rate": 0.25}


def block(**options: Any) -> MoEFeedForward:
    torch.manual_seed(3)
    layer = make(**{**OPTIONS, **options})
    feed_forward = MoEFeedForward(layer.config, dtype=torch.float64)
    feed_forward.load_state_dict(layer.state_dict())
    return feed_forward


def report(layer: MoE, x: Tensor) -> MoEOutput:
    """The output of the layer if it is a `MoE`."""
    return MoE.forward(layer, x)


def bias_of(layer: nn.Module) -> Tensor:
    return layer.state_dict()["router.score_correction_bias"].clone()


WAYS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "called": lambda layer: layer,
    "checkpoint": lambda layer: partial(checkpoint, layer, use_reentrant=False),
    "reentrant": lambda layer: partial(checkpoint, layer, use_reentrant=True),
    "keep_routing": lambda layer: partial(checkpoint, layer, use_reentrant=False, context_fn=maxmoe.keep_routing),
    "compiled": lambda layer: compile_whole(layer, "aot_eager"),
    "compiled_checkpoint": lambda layer: compile_whole(partial(checkpoint, layer, use_reentrant=False), "aot_eager"),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile about itself
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_micro_batches_count_once_and_evaluation_does_not(
    way: Callable[[nn.Module], Callable[[Tensor], Tensor]],
) -> None:
    layer = block()
    batches = [tokens(layer, 2, 5).requires_grad_() for _ in range(3)]
    outputs = [report(layer, x) for x in batches]
    counts = torch.stack([output.stats.tokens_per_expert for output in outputs]).sum(0)
    bias, accumulator, forward = bias_of(layer), StatsAccumulator(layer), way(layer)
    for _ in range(2):
        for x in batches:
            forward(x).sum().backward()
        with torch.no_grad():
            layer(batches[0])
        layer(batches[0])  # its backward is never called
        step = accumulator.update()
        stats = step.layers["moe"]
        assert stats.tokens_per_expert.equal(counts) and stats.dropped == 0
        torch.testing.assert_close(step.aux_loss, torch.stack([output.aux_loss for output in outputs]).mean())
        entropy = torch.stack([output.stats.router_entropy for output in outputs]).mean()
        torch.testing.assert_close(stats.router_entropy, entropy)
        bias = bias + 0.25 * (counts.double().mean() - counts).sign()
        assert bias_of(layer).equal(bias)
        layer.router.score_correction_bias.copy_(bias - 0.25 * (counts.double().mean() - counts).sign())
        bias = bias_of(layer)


def test_a_whole_model() -> None:
    class Residual(nn.Module):
        def __init__(self, layer: MoE) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            update = self.layer(x)
            return x + (update if isinstance(update, Tensor) else update.hidden_states)

    without_bias = make(**{**OPTIONS, "score_correction_bias": False, "correction_bias_update_rate": 0.0})
    layers = (block(), without_bias, block(buffer_factor=0.5), block(buffer_factor=0.5, overflow="chunks"))
    model = nn.Sequential(*map(Residual, layers))
    accumulator, x = StatsAccumulator(model), tokens(without_bias, 2, 8)
    outputs, inputs = [], x
    for residual in model:
        outputs.append(report(residual.layer, inputs))
        inputs = residual(inputs)
    model(x).sum().backward()
    step = accumulator.update()
    assert list(step.layers) == ["0.layer", "1.layer", "2.layer", "3.layer"]
    torch.testing.assert_close(step.aux_loss, sum(output.aux_loss for output in outputs))
    for stats, output in zip(step.layers.values(), outputs, strict=True):
        for got, expected in zip(stats, output.stats, strict=False):
            torch.testing.assert_close(got, expected)
    assert step.layers["2.layer"].dropped == 24
    assert step.layers["3.layer"][3:] == (1.0, 1)  # all rows are in this process
    for _ in range(3):
        model(x).sum().backward()
    assert accumulator.update().layers["3.layer"][3:] == (1.0, 3)
    nothing = accumulator.update()
    assert nothing.layers["3.layer"][3:] == (0.0, 0)
    assert nothing.aux_loss == 0 and not any(stats.tokens_per_expert.any() for stats in nothing.layers.values())


class Named(nn.Module):
    """A model whose modules have the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.moe = nn.Sequential(block()), block()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.module(x))


def wrapped(wrap: Callable[[nn.Module], nn.Module], layer: str) -> nn.Module:
    """A model one of whose layers is wrapped."""
    model = Named()
    setattr(model, layer, wrap(getattr(model, layer)))
    return model


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "nothing": Named,
    "DDP": lambda: DistributedDataParallel(Named()),
    "compile": lambda: compiled(Named()),
    "FSDP1": lambda: fsdp1(Named()),
    "checkpoint_wrapper": lambda: checkpoint_wrapper(Named()),
    "a layer": lambda: wrapped(compiled, "moe"),
    "each of its layers": lambda: DistributedDataParallel(wrapped(checkpoint_wrapper, "module")),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:.*FullyShardedDataParallel:FutureWarning")
def test_layers_have_the_names_of_the_model_that_was_wrapped() -> None:
    def check(wrapper: str) -> None:
        assert [*StatsAccumulator(WRAPPERS[wrapper]()).update().layers] == ["module.0", "moe"]

    run_cases(check, 1, [(wrapper,) for wrapper in WRAPPERS])


def test_a_layer_that_is_the_model_is_called_moe() -> None:
    for layer in (block(), compiled(block())):
        assert list(StatsAccumulator(layer).update().layers) == ["moe"]


def test_it_changes_no_gradient_and_no_frozen_output() -> None:
    layer = block()
    x = tokens(layer).requires_grad_()
    expected = torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()])
    StatsAccumulator(layer)
    for one, other in zip(torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()]), expected, strict=True):
        assert torch.equal(one, other)
    assert not layer.requires_grad_(False)(x.detach()).requires_grad


@pytest.mark.parametrize("options", [{}, {"num_groups": 1, "top_k_groups": 1, "correction_bias_rule": "quantile"}])
def test_reset_forgets_a_step_that_ended_early(options: dict[str, Any]) -> None:
    layer, twin = block(**options), block(**options)
    x, accumulators = tokens(layer, 2, 5).requires_grad_(), [StatsAccumulator(layer), StatsAccumulator(twin)]
    layer(x.flip(2)).sum().backward()
    accumulators[0].reset()
    for each in (layer, twin):
        each(x).sum().backward()
    (got,), (expected,) = (accumulator.update().layers.values() for accumulator in accumulators)
    assert got.tokens_per_expert.equal(expected.tokens_per_expert) and bias_of(layer).equal(bias_of(twin))


def test_a_model_without_layers() -> None:
    with pytest.raises(ValueError, match=r"^Linear must have layers of type MoE, got none$"):
        StatsAccumulator(nn.Linear(2, 2))


def test_an_update_within_join_is_refused() -> None:
    """Where ranks have different numbers of batches; after the context, it has the tokens of all of them."""

    def check() -> None:
        model = DistributedDataParallel(block())
        accumulator = StatsAccumulator(model)
        x = torch.randn(2, 7, dtype=torch.float64)
        with model.join():
            for _ in range(2 + dist.get_rank()):
                model(x).sum().backward()
                with pytest.raises(RuntimeError, match=r"^update\(\) must be called by all ranks, and within join"):
                    accumulator.update()
        assert accumulator.update().layers["moe"].tokens_per_expert.sum() == 5 * 2 * 3
        with model.join(enable=False):
            model(x).sum().backward()
            assert accumulator.update().layers["moe"].tokens_per_expert.sum() == 2 * 2 * 3

    run_ranks(check, 2)


def test_models_with_a_process_group_are_copied() -> None:
    def check() -> None:
        group = dist.new_group([0])
        model = make()
        StatsAccumulator(model, process_group=group)
        copied = copy.deepcopy(model)
        assert copied.metrics_accumulator is not model.metrics_accumulator
        assert copied.metrics_accumulator.step.process_group is group

    run_ranks(check, 1)
