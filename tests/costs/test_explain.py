"""`maxmoe.costs.explain`: the whole output under every preset against reviewed files; its warnings.

A change of a rule or of a plan is a difference in tests/costs/expected. To accept it::

    PYTHONPATH=tests:examples python -m costs.test_explain
"""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from maxmoe import ZeroComputation, presets
from maxmoe.costs import Explanation, explain
from maxmoe.declaration import EXPERT_TOKEN_DIMS
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel import Declaration
from maxmoe.parallel.plan.sharded_tokens import activation_spec
from maxmoe.sharding import LogicalRules, Mesh
from support import parallel_decoder
from support.measured_step import PRESET_LAYOUTS

FOLDER = Path(__file__).parent / "expected"
PRESETS = [layout.rules for layout in PRESET_LAYOUTS]
AXES = ("stage", "data", "fsdp", "fsdp_transpose", "context", "expert", "tensor")
# DeepSeek-V3 with every number smaller.
MOE = presets.deepseek_v3(hidden_size=512, intermediate_size=128, num_experts=64)
CONFIG = DecoderConfig(
    vocab_size=4096,
    hidden_size=512,
    num_layers=5,
    num_heads=16,
    head_dim=64,
    intermediate_size=2048,
    moe=MOE,
    num_dense_layers=1,
    max_sequence_length=1024,
)

ACTIVATIONS = {
    "tokens": ("activation_batch", "activation_length", "activation_embed"),
    "queries": ("activation_batch", "activation_length", "activation_heads"),
    "keys": ("activation_batch", "activation_kv_length", "activation_kv_heads"),
    "dense": ("activation_batch", "activation_length", "activation_mlp"),
    "logits": ("activation_batch", "activation_length", "activation_vocab"),
    "inputs of experts": (*EXPERT_TOKEN_DIMS, "activation_embed_moe"),
    "inside of experts": (*EXPERT_TOKEN_DIMS, "activation_mlp_moe"),
}


def activations(mesh: Mesh, rules: LogicalRules) -> str:
    """The specs of activations by the rules, because some names have no effect on a plan."""
    return "\n".join(f"{label}: {activation_spec(names, mesh, rules)!r}" for label, names in ACTIVATIONS.items())


def planned(preset: str) -> str:
    """The output on a mesh with every axis of the preset, so that every axis is covered."""
    rules = LogicalRules.load(preset)
    named = {axis for _, axes in rules for axis in axes}
    mesh = Mesh.planned({axis: 2 for axis in AXES if axis in named})
    model = Decoder(CONFIG, device="meta")
    explanation = explain(model, mesh, rules)
    assert explanation.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    parts = (activations(mesh, rules), explanation)
    return "\n\n".join([f"{preset} on {mesh}", *map(str, parts)]) + "\n"


@pytest.mark.parametrize("preset", PRESETS)
def test_is_as_expected(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = FOLDER / f"{preset}.txt"
    expected, actual = path.read_text().splitlines(), planned(preset).splitlines()
    difference = list(difflib.unified_diff(expected, actual, str(path), "now", lineterm=""))
    assert not difference, "\n".join(difference)
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(PRESETS)


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


ROWS, NO_COLUMNS = ("rows", ["a"]), ("columns", list[str]())


@pytest.mark.parametrize(
    ("mesh", "rules", "reasons", "shape"),
    [
        ({"a": 2, "b": 3}, [ROWS, ("columns", ["a"]), ("columns", ["b", "c"])], "rows: a | columns: b c", (4, 2)),
        ({"a": 2}, [ROWS, ("columns", ["a"])], "rows: a | columns: its axes are taken", (4, 6)),
        ({"a": 2}, [NO_COLUMNS, ROWS], "rows: a | columns: -", (4, 6)),
        ({"a": 2}, [ROWS], "rows: a | columns: no rule", (4, 6)),
    ],
)
def test_rules_that_apply_and_rules_that_cannot(
    monkeypatch: pytest.MonkeyPatch, mesh: Any, rules: Any, reasons: str, shape: tuple[int, int]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    explanation = explained(Named(), mesh, *rules)
    assert reasons in " ".join(str(explanation).split())
    assert explanation.parameters[0].local_shape == shape


def test_what_may_be_unintended_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    big = Stack(Named(100, 100), Named(2, 1))
    (warning,) = explained(big, {"a": 4}, ("rows", []), NO_COLUMNS).warnings
    assert warning == "blocks.0.weight is replicated on every rank: 39.06 KiB, 100% of the parameters of a rank"
    assert not explained(big, {"a": 1}, ("rows", []), NO_COLUMNS).warnings
    explanation = explained(nn.Sequential(nn.Linear(3, 2, bias=False), Named()), {"a": 2}, ROWS)
    assert "parameters without logical names are not sharded: 0.weight" in explanation.warnings
    assert "no rule for the logical name 'columns': its dims are not sharded" in explanation.warnings
    assert all(f"Warning: {warning}." in str(explanation) for warning in explanation.warnings)
    model = nn.Sequential(nn.Embedding(8, 6), Stack(nn.Linear(6, 6)))
    (warning,) = (text for text in explain(model, Mesh.planned({"context": 2}), "cp-as-ep").warnings if "mixes" in text)
    assert warning.startswith("the rules shard sequences over ('context',), and Stack declare nothing")
    text = str(explained(Named(8, 6), {"a": 4}, ("rows", []), ("columns", ["a", "far"])))
    assert text.startswith("Every rank holds ") and "a=4 does not divide their dims: weight" in text.splitlines()[0]
    assert "Dropped: a from dim 1 of weight: 6 is not divisible by 4." in text
    assert "Axes of the rules that this mesh lacks, or has with size 1: far." in text


@pytest.mark.parametrize(
    ("num_copies", "dispatch", "reason"),
    [
        (7, "ring_of_experts", "2 copies of a token are no more bytes than 2.13 of top_k (4) rows"),
        (8, "ring_of_experts", "2 copies of a token are no more bytes than 2 of top_k (4) rows"),
        (8, "ragged_all_to_all", "2.4 of top_k (4) rows of a token are fewer bytes than 3 copies"),
    ],
)
def test_rows_of_copy_experts_are_not_counted(num_copies: int, dispatch: str, reason: str) -> None:
    size = 2 if dispatch == "ring_of_experts" else 3
    copies = ZeroComputation(copy=num_copies)
    moe = replace(parallel_decoder.MOE, top_k=4, zero_computation=copies, num_experts=size * 4)
    model = Decoder(replace(parallel_decoder.CONFIG, moe=moe), device="meta")
    for plan in explain(model, Mesh.planned({"expert": size}), "ep-as-dp").dispatch.values():
        assert (plan.strategy, plan.reason) == (dispatch, reason)


def write() -> None:
    """Accept the current output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        for preset in PRESETS:
            (FOLDER / f"{preset}.txt").write_text(planned(preset))


if __name__ == "__main__":
    write()
