"""Plans: axes over which ranks compute parts, unless they shard the tokens, and warnings."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoEConfig, MoEFeedForward
from maxmoe.costs import estimate, explain
from maxmoe.parallel import Declaration
from maxmoe.parallel.parallelize import plan_warnings
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import VARIANTS, decoder


class BiasedFeedForward(nn.Module):
    """A tensor-parallel module whose first parameter has no dim "embed", with custom names of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up_bias, self.up = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16, 8))
        names = {"up_bias": ("ffn",), "up": ("ffn", "columns")}
        self.declaration = Declaration(logical_names=names, tensor_parallel_dims={"ffn": 16})

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.up.T + self.up_bias) @ self.up


def saved(module: nn.Module, sizes: dict[str, int], axes: tuple[str, ...]) -> int:
    """The bytes that a rank saves for 2 sequences of 4 tokens."""
    rules = LogicalRules([("ffn", axes), ("activation_ffn", axes), ("columns", None)])
    costs = estimate(
        module,
        Mesh.planned(sizes),
        rules,
        batch_size=2,
        sequence_length=4,
        allow_unused=True,
        inputs=lambda *tokens: (torch.empty(*tokens, 8),),
    )
    return costs.memory["activations"]


@pytest.mark.parametrize("size", [1, 4])
def test_dims_of_any_name(size: int) -> None:
    """The input is whole, what is between the two products is a part."""
    assert saved(BiasedFeedForward(), {"tensor": size}, ("tensor",)) == 2 * 4 * (8 + 16 // size) * 4


def test_axes_together_divide_the_number_of_parts() -> None:
    """Two heads with eight channels each can be divided by either of two axes, but not by both."""
    heads, axes = BiasedFeedForward(), ("tensor", "context")
    heads.declaration = replace(heads.declaration, tensor_parallel_dims={"ffn": 2})
    assert saved(heads, dict.fromkeys(axes, 2), axes) == 2 * 4 * (8 + 16 // 2) * 4


# Axes that rules give to the tokens and to parts of a computation


def test_explain_names_the_rules_without_effect() -> None:
    rules = LogicalRules.load("default").override([("activation_batch", ["data", "fsdp", "tensor"])])
    explanation = explain(decoder(), Mesh.planned({"tensor": 2}), rules)
    names = ["activation_heads", "activation_kv_heads", "activation_mlp", "activation_mlp_moe", "activation_embed"]
    assert explanation.plan.axes_of_tokens == dict.fromkeys(names, ("tensor",))
    message = (
        "the rule 'activation_mlp' has no effect over tensor: that shards the tokens, and every rank computes the "
        "whole dim for its own"
    )
    assert message in explanation.warnings


@pytest.mark.parametrize("preset", ["default", "ep-tp", "pipeline-large-moe", "cp-as-ep"])
def test_presets_give_no_axis_to_both(preset: str) -> None:
    rules = LogicalRules.load(preset)
    sizes = {axis: 2 for _, axes in rules for axis in axes}
    for config in VARIANTS.values():
        assert not make_plan(decoder(config), Mesh.planned(sizes), rules, dispatch="gather_weights").axes_of_tokens


# Warnings of parameters that an axis `fsdp` leaves whole, with two lines that shard them

SIZES = {"fsdp": 2, "expert": 2}


def model_of(*dense: nn.Module) -> nn.Sequential:
    config = MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    return nn.Sequential(*dense, MoEFeedForward(config))


def warnings_of(model: nn.Module, sizes: dict[str, int] = SIZES, rules: str = "ep-as-dp") -> list[str]:
    table = LogicalRules.load(rules)
    return plan_warnings(make_plan(model, Mesh.planned(sizes), table, allow_unused=True), table)


@pytest.mark.parametrize("rules", ["ep-as-dp", "shard-exp-on-fsdp"])
def test_the_two_lines_shard_them(rules: str) -> None:
    model = model_of(nn.Linear(8, 64), nn.Linear(64, 8), nn.LayerNorm(8))
    (message,) = warnings_of(model, rules=rules)
    assert message.startswith(
        "58% of the parameters are whole on every rank along fsdp=2, because no module declares their names: 0.weight, "
        "1.weight, 0.bias, and 3 more. To shard their first dim, before parallelize:\n"
    )
    before = make_plan(model, Mesh.planned(SIZES), LogicalRules.load(rules), allow_unused=True).parameters
    lines = [line.strip() for line in message.splitlines()[1:]]
    assert len(lines) == 2
    exec("import maxmoe\n" + "\n".join(lines), {"model": model})
    assert warnings_of(model, rules=rules) == []
    after = make_plan(model, Mesh.planned(SIZES), LogicalRules.load(rules), allow_unused=True).parameters
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
    [(model_of(nn.LayerNorm(8)), SIZES), (model_of(nn.Linear(8, 64)), {"expert": 4}), (declared_whole(), SIZES)],
    ids=["few", "no axis fsdp", "on purpose"],
)
def test_no_warning(model: nn.Module, sizes: dict[str, int]) -> None:
    assert warnings_of(model, sizes) == []
