"""`parallelize` gets a wrapper around a model: the model generates without the wrapper, which is trained."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maxmoe.models import Decoder
from maxmoe.models.decoder import DecoderOutput
from maxmoe.parallel import Declaration, parallelize
from maxmoe.sharding import Mesh
from parallel.steps_on_ranks import Case, Part, Results, check_cases, made
from support.adapted_decoders import add_adapters
from support.parallel_decoder import BLOCK, MeshRules, batch, decoder, loss
from support.run_ranks import run_ranks


class Wrapper(nn.Module):
    """Calls a decoder, and has a parameter, which FSDP2 shards too."""

    declaration = Declaration(logical_names={"scale": ("embed",)})

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.linspace(0.5, 1.5, 32, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> DecoderOutput:
        output: DecoderOutput = self.model(tokens)
        return output._replace(logits=output.logits * self.scale)


def wrapped(wrap: Callable[[Decoder], nn.Module]) -> nn.Module:
    return wrap(decoder(BLOCK))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def generation(model: nn.Module, part: Part) -> Results:
    """Generation before and between steps of training, also after an interruption."""
    inner = next(module for module in model.modules() if isinstance(module, Decoder))
    tokens, targets = map(part, batch())
    for _ in range(2):
        stored = list(model.parameters())
        hook = inner.blocks[0].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            inner.generate(tokens[:1], 4)
        hook.remove()
        generated = inner.generate(torch.arange(3).unsqueeze(0), 4, temperature=0)
        assert all(map(operator.is_, model.parameters(), stored))
        loss(model(tokens), targets).backward()
    return Results(of_all={"generated": generated})


def test_the_model_in_a_wrapper_generates() -> None:
    fsdp = {"fsdp": 2}
    with_scale, adapted = made(wrapped, Wrapper), made(wrapped, add_adapters)
    check_cases(
        [
            Case("parameters of its own", MeshRules("pure-fsdp", fsdp), with_scale, generation),
            Case("adapters", MeshRules("ep-as-dp", fsdp), adapted, generation),
        ]
    )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_ddp_and_zero_after_parallelize() -> None:
    """One sentence each, where an operator of torch would say that it does not know DTensors; before, both work."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def check() -> None:
        plain = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(DistributedDataParallel(plain).parameters(), torch.optim.SGD, lr=1.0)
        model = parallelize(decoder(), Mesh({"expert": 2}), "ep-as-dp")
        plain(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        DistributedDataParallel(plain)
        message = r"^DistributedDataParallel must not wrap a module after parallelize, got "
        for inner in (model, Wrapper(model)):
            with pytest.raises(ValueError, match=f"{message}{type(inner).__name__}: parallelize reduces"):
                DistributedDataParallel(inner)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1.0)
        before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
        loss(model(batch()[0]), batch()[1]).backward()
        with pytest.raises(ValueError, match=r"^ZeroRedundancyOptimizer must not hold parameters of a module "):
            optimizer.step()
        assert all(torch.equal(parameter.to_local(), before[name]) for name, parameter in model.named_parameters())  # type: ignore[attr-defined]

    run_ranks(check, 2)


def test_training_without_the_wrapper_is_refused_on_every_rank() -> None:
    def check() -> None:
        model = parallelize(Wrapper(decoder()), Mesh({"fsdp": 2}), "pure-fsdp")
        message = (
            r"^model\.embedding\.weight is gathered in the forward of the module given to parallelize, got a call of a "
            r"module inside of it: call that module, or this one under torch\.no_grad\(\)$"
        )
        with pytest.raises(RuntimeError, match=message):
            model.model(batch()[0])
        loss(model(batch()[0]), batch()[1]).backward()

    run_ranks(check, 2)
