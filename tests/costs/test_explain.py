"""`maxmoe.costs.explain`: the sharding of every parameter and its reason, as values and as a table."""

import math
import re

import pytest
import torch
from torch import nn

from maxmoe import MoE, MoEConfig
from maxmoe.costs import explain
from maxmoe.costs.explain import Explanation
from maxmoe.models import Decoder
from maxmoe.parallel import Declaration, parallelize
from maxmoe.sharding import LogicalRules, Mesh
from support.measured_step import PRESET_LAYOUTS
from support.parallel_decoder import CONFIG, MeshRules, decoder
from support.run_ranks import run_ranks


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")


class Named(nn.Module):
    declaration = Declaration(logical_names={"weight": ("rows", "columns")})

    def __init__(self, rows: int = 8, columns: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def explained(module: nn.Module, mesh: dict[str, int], *rules: tuple[str, list[str]]) -> Explanation:
    return explain(module, Mesh.planned(mesh), LogicalRules(rules), allow_unused=True)


def rows_of(explanation: Explanation) -> dict[str, list[str]]:
    """The cells of the table of parameters by the label of the row."""
    lines = str(explanation).split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {first: rest for first, *rest in cells}


def parts_of_a_rank(layout: MeshRules) -> dict[str, tuple[tuple[int, ...], int]]:
    model = parallelize(decoder(), Mesh(layout.sizes), layout.rules, dispatch="ring_of_experts")
    parts = ((name, parameter.to_local()) for name, parameter in model.named_parameters())
    return {name: (tuple(part.shape), part.nbytes) for name, part in parts}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", PRESET_LAYOUTS, ids=str)
def test_parameters_land_where_it_says(layout: MeshRules) -> None:
    explanation = explain(decoder(), Mesh.planned(layout.sizes), layout.rules, dispatch="ring_of_experts")
    said = {parameter.name: (parameter.local_shape, parameter.local_bytes) for parameter in explanation.parameters}
    assert run_ranks(parts_of_a_rank, layout.world_size, layout) == [said] * layout.world_size
    assert explanation.num_parameters == sum(parameter.numel() for parameter in decoder().parameters())


def test_rules_that_apply_and_those_that_cannot() -> None:
    rules = [("rows", ["a"]), ("columns", ["a"]), ("columns", ["b", "c"])]
    explanation = explained(Named(), {"a": 2, "b": 3}, *rules)
    assert rows_of(explanation)["weight"][0] == "rows: a | columns: b c"
    assert explanation.parameters[0].local_shape == (4, 2)
    assert rows_of(explained(Named(), {"a": 2}, *rules[:2]))["weight"][0] == "rows: a | columns: its axes are taken"
    assert rows_of(explained(Named(), {"a": 2}, ("columns", []), *rules[:1]))["weight"][0] == "rows: a | columns: -"


def test_axes_that_do_not_divide_are_told() -> None:
    explanation = explained(Named(8, 6), {"a": 4}, ("rows", []), ("columns", ["a", "far"]))
    (parameter,) = explanation.parameters
    assert [(drop.axis, drop.dim) for drop in parameter.parameter.indivisible] == [("a", 1)]
    assert "Dropped: a from dim 1 of weight: 6 is not divisible by 4." in str(explanation)
    assert "Axes of the rules that this mesh lacks, or has with size 1: far." in str(explanation)


def test_repeated_layers_are_one_row() -> None:
    blocks = [Named(4), *(Named() for _ in range(3)), Named(4), Named()]
    rules = [("rows", ["a"]), ("columns", [])]
    explanation = explained(Stack(*blocks), {"a": 2}, *rules)
    assert len(explanation.parameters) == 6
    rows = rows_of(explanation)
    assert list(rows)[:2] == ["blocks.0,4.weight x2", "blocks.1-3,5.weight x4"]
    assert rows["blocks.1-3,5.weight x4"] == ["rows: a | columns: -", "a | -", "[4, 6]", "384 B"]
    assert rows["all 240 parameters"] == ["480 B"]


def test_layers_of_other_shapes_or_places_are_other_rows() -> None:
    model = Decoder(CONFIG, device="meta")
    labels = list(rows_of(explain(model, Mesh.planned({"expert": 2}), "ep-tp")))
    assert "blocks.0-1.attention.q_proj.weight x2" in labels
    assert "blocks.0.feed_forward.up_proj.weight" in labels
    assert "blocks.1.feed_forward.experts.up_proj" in labels


def test_large_weights_on_every_rank_are_a_warning() -> None:
    big, small = Named(100, 100), Named(2, 1)
    rules = [("rows", []), ("columns", [])]
    (warning,) = explained(Stack(big, small), {"a": 4}, *rules).warnings
    assert warning == "blocks.0.weight is replicated on every rank: 39.06 KiB, 100% of the parameters of a rank"
    assert not explained(Stack(big, small), {"a": 1}, *rules).warnings
    assert not explained(Stack(big, small), {"a": 4}, ("rows", ["a"]), ("columns", [])).warnings


def test_what_has_no_name_or_no_rule_is_a_warning() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), Named())
    explanation = explained(model, {"a": 2}, ("rows", ["a"]))
    assert "parameters without logical names are not sharded: 0.weight" in explanation.warnings
    assert "no rule for the logical name 'columns': its dims are not sharded" in explanation.warnings
    assert all(f"Warning: {warning}." in str(explanation) for warning in explanation.warnings)
    rows = rows_of(explanation)
    assert rows["0.weight"][0] == "no names"
    assert rows["1.weight"][0] == "rows: a | columns: no rule"


def test_modules_that_may_mix_tokens_are_a_warning() -> None:
    model = nn.Sequential(nn.Embedding(8, 6), Stack(nn.Linear(6, 6)))
    (warning,) = (text for text in explain(model, Mesh.planned({"context": 2}), "cp-as-ep").warnings if "mixes" in text)
    assert warning.startswith("the rules shard sequences over ('context',), and Stack declare nothing")
    assert not any("mixes" in text for text in explain(model, Mesh.planned({"fsdp": 2}), "pure-fsdp").warnings)


def test_nothing_is_allocated() -> None:
    model = Decoder(CONFIG, device="meta", dtype=torch.bfloat16)
    explanation = explain(model, Mesh.planned({"fsdp": 2, "expert": 2}), "shard-exp-on-fsdp")
    assert all(parameter.is_meta for parameter in model.parameters())
    up = next(parameter for parameter in explanation.parameters if parameter.name.endswith("experts.up_proj"))
    assert up.local_bytes == math.prod(up.parameter.shape) // 4 * 2


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_is_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(CONFIG, device="meta")
    explanation = explain(model, Mesh.planned({"fsdp": 2, "expert": 2}), "shard-exp-on-fsdp")
    words, labels = str(explanation).split(), rows_of(explanation)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(explanation).splitlines()
    assert columns - 20 < max(map(len, lines)) <= columns
    is_rule = re.compile("-{20,}").fullmatch
    assert sorted(word for word in " ".join(lines).split() if not is_rule(word)) == sorted(
        word for word in words if not is_rule(word)
    )
    # The path of every parameter is whole.
    assert all(any(line.startswith(label) for line in lines) for label, rest in labels.items() if rest)


def test_what_an_axis_does_not_divide_is_said_first() -> None:
    layer = MoE(MoEConfig(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2), device="meta")
    first = str(explain(layer, Mesh.planned({"fsdp": 128}), "pure-fsdp")).splitlines()[0]
    assert first.startswith("Every rank holds ") and "fsdp=128 does not divide their dims: " in first
    assert not str(explain(layer, Mesh.planned({"fsdp": 8}), "pure-fsdp")).startswith("Every rank holds")
