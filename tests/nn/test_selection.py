"""Rules of selection outside of `maxmoe.ops.route`: by logits, a score of zero for other groups, and by ids."""

from typing import Any

import pytest
import torch

from maxmoe import MoE, record_routing, replay_routing
from maxmoe.families.deepseek_v4 import HashRouting
from maxmoe.families.emo import DocumentPools
from maxmoe.nn import Selection
from support.moe_layers import (
    COMPUTE,
    Options,
    assert_meets_specification,
    ids_for,
    make,
    outcome,
    specification,
    tokens,
)
from support.operator_calls import assert_same
from support.operator_checks import compile_whole
from support.sampling import by_default

LOSSES: Options = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
GROUPS: Options = {"num_groups": 3, "top_k_groups": 2, "top_k": 4}
BASE: Options = {"score_function": "sigmoid", "score_correction_bias": True, **LOSSES}
POOLS = DocumentPools(min_size=4, max_size=4)
RULES: dict[str, Options] = {
    "logits": {**BASE, "router": Selection(by="logits")},
    "logits in groups": {**BASE, **GROUPS, "router": Selection(by="logits")},
    "zero": {**BASE, **GROUPS, "router": Selection(other_groups="zero")},
    "zero by the best": {**LOSSES, **GROUPS, "router": Selection(group_score="max", other_groups="zero")},
    "zero by logits": {**BASE, **GROUPS, "router": Selection(by="logits", other_groups="zero")},
    "hash": {**LOSSES, "score_function": "sqrtsoftplus", "router": HashRouting(num_ids=5)},
    "pools": {**LOSSES, "router": POOLS},
    "pools by sigmoid": {**LOSSES, "score_function": "sigmoid", "normalization": "none", "router": POOLS},
    "pools by logits": {**LOSSES, "score_function": "identity", "normalization": "softmax", "router": POOLS},
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def layer_of(rule: Options, **options: Any) -> MoE:
    """A layer with biases so low that the scores of some experts in the best groups are below zero."""
    layer = make(**rule, **options)
    if layer.router.score_correction_bias is not None:
        layer.router.score_correction_bias -= 0.7
    return layer


@pytest.mark.sampled(7)
@each_rule
@pytest.mark.parametrize("compute", [COMPUTE["sparse"], COMPUTE["capacity"]], ids=["sparse", "capacity"])
def test_meets_the_specification(path: str, compute: Options, rule: Options) -> None:
    layer = layer_of(rule, **compute)
    assert_meets_specification(layer)


def test_by_hand() -> None:
    """Groups of the experts 0 and 1, 2 and 3, 4 and 5; the last one is left out."""
    logits = torch.tensor([[0.5, -3.0, 0.25, -2.0, -1.0, -1.5]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    chosen = {}
    for other_groups in ("excluded", "zero"):
        rule: Options = {**BASE, **GROUPS, "router": Selection(by="logits", other_groups=other_groups)}
        layer = make(**rule, hidden_size=6)
        layer.router.score_correction_bias.copy_(bias)
        layer.router.weight.data.copy_(torch.eye(6, dtype=torch.float64))
        routing = layer.router(logits)
        chosen[other_groups] = routing.experts[0].tolist()
        scores = logits[0, routing.experts[0]].sigmoid()
        torch.testing.assert_close(routing.weights[0], scores / scores.sum())
    assert chosen == {"excluded": [2, 0, 3, 1], "zero": [2, 0, 4, 5]}


@pytest.mark.parametrize("name", by_default(RULES, ["zero by logits", "hash", "pools"]))
def test_compiles_as_one_graph(name: str) -> None:
    layer = layer_of(RULES[name])
    x = tokens(layer, 2, 6)
    assert_same(outcome(layer, x, compile_whole(layer, "aot_eager")), outcome(layer, x), 1e-12)


@each_rule
def test_replay(rule: Options) -> None:
    layer = layer_of(rule)
    x = tokens(layer, 2, 6)
    expected = outcome(layer, x)
    with record_routing(layer) as record:
        layer(x, **ids_for(layer, x))
    with replay_routing(layer, record):
        assert_same(outcome(layer, x), expected, 1e-14)
    assert_same(expected, specification(layer, x, expected), 1e-12)
