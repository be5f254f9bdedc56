"""Tables that give one axis to the tokens and to parts of a computation: tokens have precedence, numbers stay exact."""

import itertools

import pytest

from fuzz.fuzz_overrides import DECODERS, LAYERS, Table, check_decoder, check_layer, make_model
from maxmoe.costs import explain
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.sharding import LogicalRules, Mesh
from support.named import named
from support.run_ranks import run_ranks
from support.sampling import by_default

TABLES: list[tuple[str, dict[str, int], dict[str, list[str]]]] = [
    ("default", {"tensor": 2}, {"activation_batch": ["data", "fsdp", "tensor"]}),
    ("default", {"tensor": 2}, {"activation_length": ["tensor"]}),
    ("ep-tp", {"expert": 2}, {"activation_batch": ["data", "expert"]}),
    ("ep-tp", {"expert": 2}, {"activation_length": ["expert"]}),
    ("default", {"context": 2}, {"q_heads": ["context"], "kv_heads": ["context"], "activation_heads": ["context"]}),
    # `embed_moe` gets the axis in the bias of down_proj, which has no dim `mlp_moe`.
    ("default", {"tensor": 2}, {"embed_moe": ["fsdp", "tensor"]}),
    # The shared expert gate has only the dim `embed`.
    ("default", {"fsdp_transpose": 2}, {"embed": ["fsdp_transpose"], "activation_mlp": ["fsdp_transpose"]}),
]


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
@pytest.mark.parametrize("turn", by_default(range(4), [0]))
def test_numbers_are_those_of_one_process(turn: int) -> None:
    """Each turn has all tables with half of the models, one of them with the overrides first."""
    models = ["deepseek_v3", "gpt_oss", "decoder", "decoder of odd sizes"]

    def check() -> None:
        cases = itertools.product(enumerate(TABLES), enumerate(models))
        for (table_number, (preset, sizes, override)), (number, model) in cases:
            if (number + table_number + turn) % 2:
                continue
            is_first = (number // 2 + table_number // 2 + turn // 2) % 2 == 0
            rules = LogicalRules.load(preset).override(override.items())
            if is_first:  # a new rule comes before all others, and gets its axes first
                rules = LogicalRules([*rules[-len(override) :], *rules[: -len(override)]])
            table = Table([], rules, model, "auto", None)
            with named(preset, sizes, override, is_first, model):
                (check_layer if model in LAYERS else check_decoder)(model, Mesh(sizes), table)

    run_ranks(check, 2)


def test_explain_names_the_rules_without_effect() -> None:
    rules = LogicalRules.load("default").override([("activation_batch", ["data", "fsdp", "tensor"])])
    explanation = explain(make_model("decoder"), Mesh.planned({"tensor": 2}), rules)
    names = ["activation_heads", "activation_kv_heads", "activation_mlp", "activation_mlp_moe", "activation_embed"]
    assert explanation.plan.axes_of_tokens == dict.fromkeys(names, ("tensor",))
    message = (
        "the rule 'activation_mlp' has no effect over tensor: that shards the tokens, and every rank computes the "
        "whole dim for its own"
    )
    assert message in explanation.warnings


@pytest.mark.parametrize("name", list(DECODERS))
@pytest.mark.parametrize("preset", ["default", "ep-tp", "pipeline-large-moe", "cp-as-ep"])
def test_presets_give_no_axis_to_both(preset: str, name: str) -> None:
    rules = LogicalRules.load(preset)
    # A layer with a capacity refuses parts of sequences.
    sizes = {axis: 2 for _, axes in rules for axis in axes if axis != "context" or "capacity" not in name}
    plan = make_plan(make_model(name), Mesh.planned(sizes), rules, dispatch="gather_weights")
    assert not plan.axes_of_tokens
