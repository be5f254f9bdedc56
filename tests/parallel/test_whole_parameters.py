"""Parameters that an axis `fsdp` leaves whole are named once, with two lines that shard them."""

import pytest
from torch import nn

from maxmoe import MoEConfig, MoEFeedForward
from maxmoe.parallel import Declaration
from maxmoe.parallel.parallelize import plan_warnings
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.sharding import LogicalRules, Mesh

MESH = {"fsdp": 2, "expert": 2}


def model_of(*dense: nn.Module) -> nn.Sequential:
    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    return nn.Sequential(*dense, MoEFeedForward(config))


def warnings_of(model: nn.Module, sizes: dict[str, int] = MESH, rules: str = "ep-as-dp") -> list[str]:
    table = LogicalRules.load(rules)
    return plan_warnings(make_plan(model, Mesh.planned(sizes), table, allow_unused=True), table)


@pytest.mark.parametrize("rules", ["ep-as-dp", "pure-fsdp", "shard-exp-on-fsdp"])
def test_the_two_lines_shard_them(rules: str) -> None:
    model = model_of(nn.Linear(8, 64), nn.Linear(64, 8), nn.LayerNorm(8))
    (message,) = warnings_of(model, rules=rules)
    assert message.startswith(
        "58% of the parameters are whole on every rank along fsdp=2, because no module declares their names: 0.weight, "
        "1.weight, 0.bias, and 3 more. To shard their first dim, before parallelize:\n"
    )
    before = make_plan(model, Mesh.planned(MESH), LogicalRules.load(rules), allow_unused=True).parameters
    lines = [line.strip() for line in message.splitlines()[1:]]
    assert len(lines) == 2
    exec("import maxmoe\n" + "\n".join(lines), {"model": model})
    assert warnings_of(model, rules=rules) == []
    after = make_plan(model, Mesh.planned(MESH), LogicalRules.load(rules), allow_unused=True).parameters
    for name, parameter in after.items():
        if name.startswith("3."):  # declared by the layer
            assert parameter.stored.spec == before[name].stored.spec
        else:
            assert "fsdp" in parameter.stored.spec[0] and not any(before[name].stored.spec)


def declared_whole() -> nn.Module:
    linear = nn.Linear(8, 64)
    linear.declaration = Declaration(logical_names={"weight": (None, None), "bias": (None,)})
    return model_of(linear)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (model_of(nn.LayerNorm(8)), MESH),
        (model_of(nn.Linear(8, 64)), {"expert": 4}),
        (declared_whole(), MESH),
    ],
    ids=["few", "no axis fsdp", "on purpose"],
)
def test_no_warning(model: nn.Module, sizes: dict[str, int]) -> None:
    assert warnings_of(model, sizes) == []
