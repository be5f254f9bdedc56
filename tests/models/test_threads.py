"""Two threads that call one model at the same time get the bits of one thread."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import maxmoe
from maxmoe.models import Decoder
from maxmoe.nn import RoutingRecord
from support.small_decoder import make
from support.threads import in_threads

CALLS = 3


def generation(model: Decoder, seed: int) -> Callable[[], list[Tensor]]:
    """Generate from prompts of several lengths, up to and beyond the window."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, 11, (1 + seed, 2 + 2 * number), generator=generator) for number in range(CALLS)]
    return lambda: [model.generate(prompt, 12, temperature=0) for prompt in prompts]


def training(model: Decoder, seed: int, num_lengths: int = 4) -> Callable[[], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, 11, (2, 3 + number % num_lengths), generator=generator) for number in range(CALLS)]

    def step(tokens: Tensor) -> list[Tensor]:
        output = model(tokens)
        loss = output.logits.logsumexp(-1).mean() + output.aux_loss
        return [loss.detach(), output.tokens_per_expert, *torch.autograd.grad(loss, list(model.parameters()))]

    return lambda: [tensor for tokens in batches for tensor in step(tokens)]


def recording(model: Decoder, seed: int) -> Callable[[], list[Tensor]]:
    def record() -> list[Tensor]:
        with maxmoe.record_routing(model) as recorded:
            tensors = training(model, seed)()
        return tensors + [ids for path in sorted(recorded.calls) for ids in recorded.calls[path]]

    return record


def replay(model: Decoder, seed: int) -> Callable[[], list[Tensor]]:
    """Route the calls of the training to the experts of another seed's model."""
    step, other = training(model, seed), make(num_layers=2)
    with maxmoe.record_routing(other) as record:
        training(other, seed)()
    calls: RoutingRecord = record

    def run() -> list[Tensor]:
        with maxmoe.replay_routing(model, calls):
            return step()

    return run


@pytest.mark.parametrize("recompute", [(), ("blocks",)], ids=["saved", "recomputed"])
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param((training, generation), id="training beside generation"),
        pytest.param((replay, recording), id="replay beside recording"),
        pytest.param((generation, generation), id="generation beside generation", marks=pytest.mark.slow),
        pytest.param((training, recording), id="training beside recording", marks=pytest.mark.slow),
        pytest.param((replay, replay), id="replay beside replay", marks=pytest.mark.slow),
    ],
)
def test_two_threads(pair: tuple[Any, Any], recompute: tuple[str, ...]) -> None:
    model = make(num_layers=2, recompute=recompute)
    functions = [make_function(model, seed) for seed, make_function in enumerate(pair)]
    expected = [function() for function in functions]
    for got, wanted in zip(in_threads(*functions), expected, strict=True):
        assert len(got) == len(wanted)
        for number, (tensor, alone) in enumerate(zip(got, wanted, strict=True)):
            assert torch.equal(tensor, alone), number


def test_a_compiled_model_trains_beside_generation() -> None:
    model = make(num_layers=1, num_dense_layers=0)
    functions = [training(model, 0, num_lengths=1), generation(model, 1)]
    expected = functions[1]()
    model.compile(backend="eager")
    compiled = functions[0]()
    got = in_threads(*functions)
    assert all(map(torch.equal, got[0], compiled)) and all(map(torch.equal, got[1], expected))
