"""Rules of selection outside of `maxmoe.ops.route`, by hand; test_moe.py compares all rules with the specification."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from maxmoe import MoE, record_routing
from maxmoe.families.emo import DocumentPools
from maxmoe.nn import Selection
from support.moe_layers import GROUPS, LOSSES, make, outcome, tokens
from support.operator_calls import assert_same


def test_logits_and_other_groups() -> None:
    """Groups of the experts 0 and 1, 2 and 3, 4 and 5; the last one is left out."""
    logits = torch.tensor([[0.5, -3.0, 0.25, -2.0, -1.0, -1.5]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    chosen = {}
    for other_groups in ("excluded", "zero"):
        rule = {"score_function": "sigmoid", "router": Selection(by="logits", other_groups=other_groups)}
        layer = make(**GROUPS, **rule, score_correction_bias=True, hidden_size=6)
        layer.router.score_correction_bias.copy_(bias)
        layer.router.weight.data.copy_(torch.eye(6, dtype=torch.float64))
        routing = layer.router(logits)
        chosen[other_groups] = routing.experts[0].tolist()
        scores = logits[0, routing.experts[0]].sigmoid()
        torch.testing.assert_close(routing.weights[0], scores / scores.sum())
    assert chosen == {"excluded": [2, 0, 3, 1], "zero": [2, 0, 4, 5]}


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
