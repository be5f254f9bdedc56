"""Arguments that surgery refuses before anything changes."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from maxmoe.convert.surgery import duplicate_experts, merge_experts, prune_experts
from maxmoe.families.deepseek_v4 import HashRouting
from maxmoe.nn import ExpertRunner, LocalDispatcher, LocalExperts, Router
from support.moe_layers import make

ERRORS: list[tuple[Callable[[Any], None], str]] = [
    (lambda model: prune_experts(model, [0], optimizer=[]), "optimizer must be a torch.optim.Optimizer, got list"),  # type: ignore[arg-type]
    (lambda model: prune_experts(model, [0, 1, 2, 3]), "0: top_k (3) must not exceed num_experts (2)"),
    (lambda model: prune_experts(model, [*range(6)]), "0: num_experts must be a positive int, got 0"),
    (lambda model: prune_experts(model, [6]), "0: experts must be integers in [0, num_experts (6)), got 6"),
    (lambda model: prune_experts(model, [-1]), "0: experts must be integers in [0, num_experts (6)), got -1"),
    (lambda model: prune_experts(model, torch.tensor([0.5])), "0: experts must be integers in [0, num_experts (6))"),
    (lambda model: prune_experts(model, [True]), "0: experts must be integers in [0, num_experts (6)), got True"),
    (lambda model: prune_experts(model, 1), "0: experts must be a sequence, got 1"),  # type: ignore[arg-type]
    (lambda model: prune_experts(model, torch.tensor(1)), "0: experts must be a sequence, got 1"),
    (lambda model: prune_experts(model, None), "0: experts must be a sequence, got None"),  # type: ignore[type-var]
    (lambda model: merge_experts(model, [0, 1]), "0: experts must be a sequence, got 0"),  # type: ignore[list-item]
    (lambda model: merge_experts(model, 3), "0: sets must be a sequence, got 3"),  # type: ignore[arg-type]
    (lambda model: merge_experts(model, [[]]), "0: each set must have at least one expert, got [()]"),
    (lambda model: prune_experts(model, [2, 1, 2]), "0: experts must be named once, got 2 2 times"),
    (lambda model: merge_experts(model, [[0, 1], [1, 2]]), "0: experts must be named once, got 1 2 times"),
    (lambda model: duplicate_experts(model, [0], top_k=8), "0: top_k (8) must not exceed num_experts (7)"),
    (lambda model: duplicate_experts(model, [0], top_k=0), "top_k must be a positive int, got 0"),
    (lambda model: duplicate_experts(model, [0], noise=-1), "noise must be a finite float >= 0, got -1"),
    (lambda model: prune_experts(model, {"1": [0, 1]}), "1: top_k (3) must not exceed num_experts (2)"),
    (lambda model: merge_experts(model, {"0": [[0, 1]], "1": [[0, 1, 2]]}), "1: top_k (3) must not exceed"),
]


@pytest.mark.parametrize(("operation", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_nothing_changes_if_something_does_not_fit(operation: Callable[[nn.Module], None], message: str) -> None:
    model = nn.Sequential(make(), make(num_experts=4))
    parameters, configs = list(model.parameters()), [layer.config for layer in model]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        operation(model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert [layer.config for layer in model] == configs


def test_other_routers_adapters_and_dispatchers_are_refused() -> None:
    layer = make()
    layer.runner = ExpertRunner(LocalDispatcher(dataclasses.replace(LocalExperts.all_of(layer.config), count=3)))
    with pytest.raises(ValueError, match="moe must have the dispatcher of one process, got LocalDispatcher"):
        prune_experts(layer, [0])
    layer = make()
    layer.router = nn.Sequential(layer.router)
    with pytest.raises(ValueError, match=r"moe.router must be a maxmoe.nn.Router, got Sequential"):
        prune_experts(layer, [0])
    layer.router = type("Other", (Router,), {})(layer.config)
    with pytest.raises(ValueError, match=r"moe.router must be a maxmoe.nn.Router, got Other"):
        prune_experts(layer, [0])
    layer = make()
    layer.experts = nn.Sequential(layer.experts)
    with pytest.raises(ValueError, match=r"moe.experts must be a maxmoe.nn.Experts, got Sequential"):
        prune_experts(layer, [0])
    layer = make(router=HashRouting(num_ids=3))
    with pytest.raises(ValueError, match=r"moe must have a router without a table of experts for ids, got HashRouting"):
        prune_experts(layer, [0])


def test_layers_that_share_experts_are_refused() -> None:
    model = nn.Sequential(make(), make(), make())
    model[1].experts = model[0].experts
    with pytest.raises(ValueError, match="1 must not share its router and experts, got a parameter of 0"):
        prune_experts(model, {"1": [0]})
    prune_experts(model, {"2": [np.int64(0)]})
    assert [layer.config.num_experts for layer in model] == [6, 6, 5]
