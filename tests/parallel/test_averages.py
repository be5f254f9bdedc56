"""`torch.optim.swa_utils.AveragedModel` on meshes, against one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from maxmoe.models import Decoder
from maxmoe.parallel import parallelize
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import BLOCK, LocalSGD, MeshRules, batch, decoder, loss, token_spec
from support.parts import assert_same, part_by_definition
from support.run_ranks import run_cases

AVERAGES: dict[str, dict[str, Any]] = {
    "each tensor": {"avg_fn": get_ema_avg_fn(0.75)},
    "all at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.75)},
    "equal weights": {"multi_avg_fn": get_swa_multi_avg_fn()},
}
# Averages made before and after `parallelize`; before, where FSDP2 refuses the copy.
CASES = [
    ("each tensor", "before", MeshRules("pure-fsdp", {"fsdp": 2})),
    ("all at once", "before", MeshRules("shard-exp-on-fsdp", {"fsdp": 2})),
    ("equal weights", "before", MeshRules("default", {"tensor": 2})),
    ("each tensor", "after", MeshRules("ep-tp", {"expert": 2})),
    ("all at once", "after", MeshRules("ep-as-dp", {"expert": 2})),
]


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


def test_averages_of_parameters_and_buffers() -> None:
    expected = {}
    for how, options in AVERAGES.items():
        model = decoder(BLOCK)
        expected[how] = averaged(AveragedModel(model, use_buffers=True, **options), model, lambda tokens: tokens)

    def check(how: str, when: str, layout: MeshRules) -> None:
        mesh, rules = Mesh(layout.sizes), LogicalRules.load(layout.rules)
        model = decoder(BLOCK)
        if when == "before":
            averages = AveragedModel(model, use_buffers=True, **AVERAGES[how])
            parallelize(averages.module, mesh, rules)
            parallelize(model, mesh, rules)
        else:
            averages = AveragedModel(parallelize(model, mesh, rules), use_buffers=True, **AVERAGES[how])
        found = averaged(averages, model, partial(part_by_definition, spec=token_spec(mesh, rules), mesh=mesh))
        assert found.keys() == expected[how].keys()
        for name, tensor in found.items():
            assert_same(tensor, expected[how][name], name)

    run_cases(check, 2, CASES)
