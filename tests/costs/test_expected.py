"""The whole output of `explain` under every preset, against reviewed files.

A change of a rule or of a plan is a difference in tests/costs/expected. To accept it::

    PYTHONPATH=tests:examples python -m costs.test_expected
"""

import difflib
from pathlib import Path

import pytest

from maxmoe import MoEConfig
from maxmoe.costs import explain
from maxmoe.declaration import EXPERT_TOKEN_DIMS
from maxmoe.models import Decoder, DecoderConfig
from maxmoe.parallel.plan.sharded_tokens import activation_spec
from maxmoe.sharding import LogicalRules, Mesh
from support.measured_step import PRESET_LAYOUTS

FOLDER = Path(__file__).parent / "expected"
PRESETS = [layout.rules for layout in PRESET_LAYOUTS]
AXES = ("stage", "data", "fsdp", "fsdp_transpose", "context", "expert", "tensor")
# DeepSeek-V3 with every number smaller.
MOE = MoEConfig(
    hidden_size=512,
    intermediate_size=128,
    num_experts=64,
    top_k=8,
    score_function="sigmoid",
    score_correction_bias=True,
    num_groups=8,
    top_k_groups=4,
    routed_scaling_factor=2.5,
    num_shared_experts=1,
    load_balance_loss_weight=1e-4,
)
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
    parts = (activations(mesh, rules), explain(model, mesh, rules))
    return "\n\n".join([f"{preset} on {mesh}", *map(str, parts)]) + "\n"


@pytest.mark.parametrize("preset", PRESETS)
def test_is_as_expected(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = FOLDER / f"{preset}.txt"
    expected, actual = path.read_text().splitlines(), planned(preset).splitlines()
    difference = list(difflib.unified_diff(expected, actual, str(path), "now", lineterm=""))
    assert not difference, "\n".join(difference)


def test_there_is_one_file_for_every_preset() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(PRESETS)


def write() -> None:
    """Accept the current output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        for preset in PRESETS:
            (FOLDER / f"{preset}.txt").write_text(planned(preset))


if __name__ == "__main__":
    write()
