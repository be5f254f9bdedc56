"""check_used: names of a mesh and of rules that have no effect are errors, wherever rules meet a mesh."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import maxmoe
from maxmoe.costs import estimate, explain
from maxmoe.models import Decoder
from maxmoe.parallel import Declaration, shard_parameters
from maxmoe.sharding import LogicalRules, Mesh, check_used
from support.parallel_decoder import CONFIG, LAYOUTS
from support.run_ranks import fake_rank

Table = str | list[tuple[str, Any]]
PRESET_AXES = {"data": 2, "stage": 2, "fsdp": 2, "fsdp_transpose": 2, "context": 2, "tensor": 2, "expert": 2}
CHOICES = "; choose axes of the rules, other rules, or allow_unused=True"
TYPOS: list[tuple[dict[str, int], Table, str]] = [
    ({"fdsp": 2}, "default", "no rule has the axis 'fdsp' of Mesh(fdsp=2); the nearest are 'fsdp'" + CHOICES),
    ({"expp": 4}, "ep-tp", "no rule has the axis 'expp' of Mesh(expp=4); the nearest are 'expert'" + CHOICES),
    ({"node": 2}, "pure-fsdp", "no rule has the axis 'node' of Mesh(node=2); there are 'fsdp'" + CHOICES),
    ({"fsdp": 2}, [], "no rule has the axis 'fsdp' of Mesh(fsdp=2); there are none" + CHOICES),
    (
        {"expert": 2},
        [("exp", "expert"), ("mpl_moe", None)],
        "the rules have the name 'mpl_moe', which no module declares and no preset has; "
        "the nearest are 'mlp_moe', 'embed_moe'",
    ),
    (
        {"expert": 2},
        [("exp", "expert"), ("embed", ("fdsp", "expert"))],
        "the rules have the axis 'fdsp', which neither Mesh(expert=2) nor a preset has; the nearest are 'fsdp'",
    ),
    (
        {"rack": 2},
        [("exp", "rack"), ("embed", "rak")],
        "the rules have the axis 'rak', which neither Mesh(rack=2) nor a preset has; the nearest are 'rack'",
    ),
]
FINE: list[tuple[dict[str, int], Table]] = [
    ({}, "default"),
    (PRESET_AXES, "default"),
    ({"fdsp": 1, "expert": 2}, "default"),  # like an absent axis
    ({"rack": 1}, [("exp", ("expert", "rack"))]),
    ({"rack": 2}, [("exp", "rack"), ("embed", "fsdp")]),
]


def rules_of(table: Table) -> LogicalRules:
    return LogicalRules.load(table) if isinstance(table, str) else LogicalRules(table)


@pytest.mark.parametrize(("sizes", "table", "message"), TYPOS)
def test_a_name_without_effect_is_an_error_with_the_nearest(sizes: dict[str, int], table: Table, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_used(Mesh.planned(sizes), rules_of(table))


def test_absent_axes_of_presets_and_own_axes_of_the_mesh_pass() -> None:
    for sizes, table in [*FINE, *((layout.sizes, layout.rules) for layout in LAYOUTS)]:
        check_used(Mesh.planned(sizes), rules_of(table))


CALLS: dict[str, Callable[..., Any]] = {
    "parallelize": maxmoe.parallelize,
    "shard_parameters": shard_parameters,
    "explain": explain,
    "estimate": lambda *arguments, **options: estimate(*arguments, batch_size=4, sequence_length=8, **options),
}


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_running_and_planning_agree(call: Callable[..., Any]) -> None:
    """An axis and a name that are misspelt."""
    model = Decoder(CONFIG, device="meta")
    for sizes, table, message in (TYPOS[0], TYPOS[4]):
        with fake_rank(0, 2):
            with pytest.raises(ValueError, match=f"^{re.escape(message.split(';')[0])}"):
                call(model, Mesh(sizes), rules_of(table))
            call(copy.deepcopy(model), Mesh(sizes), rules_of(table), allow_unused=True)


class Own(nn.Module):
    declaration = Declaration(
        logical_names={"rows": ("rows", None), "absent": ("columns",)}, tensor_parallel_dims={"parts": 2}
    )
    absent = None


def test_names_of_a_module_pass() -> None:
    module, mesh = nn.Sequential(Own()), Mesh.planned({"fsdp": 2})
    module[0].rows = nn.Parameter(nn.Linear(2, 4).weight.detach())
    names = ("rows", "columns", "parts", "activation_parts")
    rules = [(name, "fsdp") for name in names]
    explain(module, mesh, LogicalRules(rules))
    for name in names:
        near = name[:-1] + "z"
        with pytest.raises(ValueError, match=f"the rules have the name '{near}', .*; the nearest are '{name}'"):
            explain(module, mesh, LogicalRules([*rules, (near, None)]))
