"""Rules of selection outside of `maxmoe.ops.route`: by logits, a score of zero for other groups, and by ids."""

import re
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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
    "pools by sigmoid": {**LOSSES, "score_function": "sigmoid", "router_bias": True, "router": POOLS},
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


def pools_of(layer: MoE) -> list[int]:
    """The numbers of experts that the tokens of each of 60 documents select, in 30 sequences of 100 tokens."""
    x = torch.randn(30, 100, 7, dtype=torch.float64)
    with record_routing(layer) as record:
        layer(x, router_inputs=torch.arange(100).ge(50).long().expand(30, 100))
    return [len(document.unique()) for document in record.calls[""][0].view(60, 50)]


def test_sizes_of_pools() -> None:
    """In training they are drawn for each document; a large document selects almost all experts of its pool."""
    rule = DocumentPools(min_size=2, max_size=4, eval_size=5)
    layer = make(router=rule, top_k=1, normalization="none")
    sizes = pools_of(layer)
    assert {2, 3, 4} <= set(sizes) <= {1, 2, 3, 4} and pools_of(layer) != sizes
    assert max(pools_of(layer.eval())) == 5


def test_a_recomputation_has_the_pools_of_its_forward() -> None:
    layer = make(**LOSSES, router=DocumentPools(min_size=3, max_size=6, eval_size=3))
    x = tokens(layer, 6, 9)

    def recomputed(*args: Any, **options: Any) -> Any:
        output = checkpoint(layer.train(), *args, use_reentrant=False, **options)
        layer.eval()
        return output

    torch.manual_seed(0)
    expected = outcome(layer, x)
    torch.manual_seed(0)
    assert_same(outcome(layer, x, recomputed), expected, 0.0)


HASH: Options = {"router": HashRouting(num_ids=5)}
WANTED = "router_inputs must be ids of tokens, which the router takes, "
REFUSED: dict[str, tuple[Options, Any, str]] = {
    "missing": (HASH, None, f"{WANTED}integer of shape (2, 6), got None"),
    "superfluous": ({}, torch.zeros(2, 6).long(), "router_inputs must be None for a router that takes no ids, got"),
    "dtype": (HASH, torch.zeros(2, 6), f"{WANTED}integer of shape (2, 6), got torch.float32 of shape (2, 6)"),
    "mask": ({"router": POOLS}, torch.ones(2, 6).bool(), WANTED.replace("tokens", "documents")),
    "list": (HASH, [[0] * 6] * 2, f"{WANTED}integer of shape (2, 6), got [[0, 0, 0,"),
    "shape": (HASH, torch.zeros(12).long(), f"{WANTED}integer of shape (2, 6), got torch.int64 of shape (12,)"),
    "range": (HASH, torch.full((2, 6), 5), f"{WANTED}in [0, 5), got 5"),
}


@pytest.mark.parametrize(("options", "ids", "message"), REFUSED.values(), ids=REFUSED)
def test_ids_that_do_not_fit(options: Options, ids: Any, message: str) -> None:
    layer = make(**options)
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(tokens(layer, 2, 6), router_inputs=ids)


def test_configs_that_do_not_fit() -> None:
    for rule, message in (
        (DocumentPools(min_size=2, max_size=4), "min_size must be in [top_k (3), number of experts (6)], got 2"),
        (DocumentPools(min_size=3, max_size=7), "max_size must be in [top_k (3), number of experts (6)], got 7"),
        (DocumentPools(min_size=3, max_size=4, eval_size=2), "eval_size must be in [top_k (3), number of experts (6)]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(router=rule)
    with pytest.raises(ValueError, match=r"HashRouting\(num_ids=5\) needs score_correction_bias=False, got True"):
        make(**HASH, score_correction_bias=True)
