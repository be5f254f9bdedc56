"""`torch.optim.swa_utils.AveragedModel` on meshes, against one process."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

from maxmoe.models import Decoder
from maxmoe.parallel import parallelize
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import BLOCK, LocalSGD, MeshRules, batch, decoder, layouts, loss, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_cases
from support.sampling import by_default

AVERAGES: dict[str, dict[str, Any]] = {
    "each tensor": {"avg_fn": get_ema_avg_fn(0.75)},
    "all at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.75)},
    "equal weights": {"multi_avg_fn": get_swa_multi_avg_fn()},
}


def averaged(averages: AveragedModel, model: Decoder, part: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Average over three steps; the parameters and buffers of the average, and the gradients of its parameters."""
    optimizer, (tokens, targets) = LocalSGD(model), map(part, batch())
    for step in range(3):
        loss(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        for buffer in model.buffers():
            buffer.add_(step)
        averages.update_parameters(model)
    averages.zero_grad()
    loss(averages(tokens), targets).backward()
    found = dict(averages.module.state_dict())
    found |= {f"gradient of {name}": each.grad for name, each in averages.module.named_parameters()}
    return {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in found.items()}


def check_layout(layout: MeshRules, is_first: bool, how: str, expected: dict[str, Tensor]) -> None:
    mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
    part = partial(part_by_definition, spec=token_spec(mesh, rules), mesh=mesh)
    model = decoder(BLOCK)
    if is_first:
        averages = AveragedModel(model, use_buffers=True, **AVERAGES[how])
        parallelize(averages.module, mesh, rules)
        parallelize(model, mesh, rules)
    else:
        averages = AveragedModel(parallelize(model, mesh, rules), use_buffers=True, **AVERAGES[how])
    found = averaged(averages, model, part)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_same(tensor, expected[name], name)


@pytest.mark.parametrize("turn", by_default(range(2), [0]))
@pytest.mark.parametrize("half", by_default(range(2), [1]))
def test_averages_of_parameters_and_buffers(half: int, turn: int) -> None:
    """Every second preset; averages made before and after `parallelize` in turn, before if FSDP2 refuses the copy."""
    expected = {}
    for how, options in AVERAGES.items():
        model = decoder(BLOCK)
        expected[how] = averaged(AveragedModel(model, use_buffers=True, **options), model, lambda tokens: tokens)
    cases = [
        (layout, "fsdp" in layout.sizes or number % 2 == turn) for number, layout in enumerate(layouts(2)[half::2])
    ]
    # Another kind of average in each case.
    averages = itertools.cycle(expected.items())
    run_cases(check_layout, 2, [(*case, *average) for case, average in zip(cases, averages, strict=False)])
