"""Custom routers that a layer refuses, and which routers count as custom."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxmoe
from maxmoe import MoE, MoEConfig
from maxmoe.nn import Routing
from maxmoe.nn.router import Router
from support.documented_routers import documented

E, D, F = 6, 8, 10


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Wrong(nn.Module):
    """A correct router, whose result is changed."""

    def __init__(self, change: Callable[[Routing], Any], config: MoEConfig) -> None:
        super().__init__()
        self.change, self.inner = change, Router(config)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Any:
        return self.change(self.inner(x, token_mask))


def at(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed[3, 1] = value
    return changed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda r: r.top_k, TypeError, r"router Wrong must return maxmoe.nn.Routing, got TopK"),
        (
            lambda r: r._replace(experts=r.experts[:, :1]),
            ValueError,
            r"experts .* \(tokens \(10\), top_k \(2\)\), got \(10, 1\)",
        ),
        (
            lambda r: r._replace(weights=r.weights[1:]),
            ValueError,
            r"weights .* \(tokens \(10\), top_k \(2\)\), got \(9, 2\)",
        ),
        (
            lambda r: r._replace(probabilities=r.probabilities[:, 1:]),
            ValueError,
            r"experts \(6\)\), got \(10, 5\)",
        ),
        (lambda r: r._replace(experts=at(r.experts, 6)), ValueError, r"in \[-1, number of experts \(6\)\), got 6"),
        (lambda r: r._replace(experts=at(r.experts, -2)), ValueError, r"in \[-1, number of experts \(6\)\), got -2"),
        (
            lambda r: r._replace(weights=at(r.weights, torch.nan)),
            ValueError,
            r"must be finite, got \[.*nan\] for token 3",
        ),
        (
            lambda r: r._replace(weights=r.weights.detach()),
            ValueError,
            r"must require a gradient, since its parameters do",
        ),
        (lambda r: r._replace(token_mask=None), ValueError, r"must pass token_mask to Routing.of"),
        (lambda r: r._replace(logits=None), ValueError, r"router_z_loss_weight \(0.1\) needs the logits .*, got None"),
        (
            lambda r: r._replace(experts=r.experts.int()),
            ValueError,
            r"experts of router Wrong must be int64, got torch.int32",
        ),
        (
            lambda r: r._replace(weights=r.weights.bfloat16()),
            ValueError,
            "weights of router Wrong must be float32 or float64, got torch.bfloat16: see Routing.of",
        ),
        (
            lambda r: r._replace(probabilities=at(r.probabilities, torch.nan)),
            ValueError,
            r"probabilities of router Wrong must be finite, got \[.*nan.*\] for token 3",
        ),
        (
            lambda r: r._replace(token_losses=at(r.weights, torch.inf)[:, 1]),
            ValueError,
            "token_losses of router Wrong must be finite, got inf for token 3",
        ),
        (
            lambda r: r._replace(token_losses=r.weights[:5, 1]),
            ValueError,
            r"token_losses of router Wrong must have shape \(tokens \(10\)\), got \(5,\)",
        ),
        (
            lambda r: r._replace(logits=r.logits[:5]),
            ValueError,
            r"logits of router Wrong must have shape \(tokens \(10\), number of experts \(6\)\), got \(5, 6\)",
        ),
        (
            lambda r: r._replace(experts=at(r.experts, -1), is_unpadded=True),
            ValueError,
            r"router Wrong must set is_unpadded=False for ids of -1, as Routing.of does, got True",
        ),
    ],
)
def test_a_wrong_routing_is_refused(change: Any, error: type[Exception], message: str) -> None:
    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=2, router_z_loss_weight=0.1)
    layer = MoE(config, router=Wrong(change, config), dtype=torch.float64)
    called: list[None] = []
    layer.experts.register_forward_pre_hook(lambda *_: called.append(None))
    with pytest.raises(error, match=message):
        layer(tokens(2, 5), torch.ones(2, 5, dtype=torch.bool))
    assert not called


ONES = torch.ones(2, 5, 3)
RIGHT: dict[str, Any] = {
    "experts": torch.zeros(2, 5, 3, dtype=torch.int64),
    "weights": ONES,
    "probabilities": torch.ones(2, 5, E),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": ONES[:1]}, r"weights must have the leading dims of experts \(2, 5\), got \(1, 5\)"),
        ({"probabilities": ONES[0]}, r"probabilities must have the leading dims of experts \(2, 5\), got \(5,\)"),
        ({"logits": ONES.transpose(0, 1)}, r"logits must have the leading dims of experts \(2, 5\), got \(5, 2\)"),
        ({"token_losses": ONES}, r"token_losses must have the leading dims of experts \(2, 5\), got \(2, 5, 3\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    Routing.of(**RIGHT)
    with pytest.raises(ValueError, match=message):
        Routing.of(**{**RIGHT, **changes})


class OfSequences(Router):
    """A subclass of the router with other logits; wrong ids if an entry of x is large."""

    def forward(self, x: Tensor, token_mask: Tensor | None = None, experts: Tensor | None = None) -> Routing:
        assert x.dim() == 3
        routing = super().forward(-x, token_mask, experts)
        return routing._replace(experts=routing.experts + E) if x[0, 0, 0] > 100 else routing


class Renamed(Router):
    """A subclass of the router with the same routing."""


def test_a_subclass_of_the_router_is_one_of_ones_own() -> None:
    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=2)
    layer = MoE(config, router=OfSequences(config), dtype=torch.float64).double()
    layer(tokens(2, 5))
    with pytest.raises(
        ValueError, match=r"expert ids of router OfSequences must be in \[-1, number of experts \(6\)\)"
    ):
        layer(tokens(2, 5) + 200)
    with pytest.raises(ValueError, match="router_bias must be False with a custom router, got True"):
        MoE(dataclasses.replace(config, router_bias=True), router=OfSequences(config))


def test_a_router_of_the_library_has_the_config_of_the_layer() -> None:
    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=2, score_correction_bias=True)
    layer = MoE(config, router=Renamed(config))
    assert layer.balanced_router is layer.router
    other = Renamed(dataclasses.replace(config, score_function="sigmoid"))
    message = (
        "score_function of the config of the router must be 'softmax' as in the config of the layer, got 'sigmoid'"
    )
    with pytest.raises(ValueError, match=message):
        MoE(config, router=other)


def test_correction_biases_are_those_of_the_router_of_the_library() -> None:
    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=2)
    with pytest.raises(
        ValueError, match="update_correction_bias needs score_correction_bias=True in the config, got F"
    ):
        MoE(config, router=documented("TopK")(config)).update_correction_bias(torch.ones(E, dtype=torch.int64))


def test_a_router_that_ignores_a_record_is_refused() -> None:
    class Deaf(documented("TopK")):  # type: ignore[misc]
        def forward(self, x: Tensor, token_mask: Tensor | None = None, experts: Tensor | None = None) -> Any:
            return super().forward(x, token_mask)

    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=2)
    layer, mask = MoE(config, router=Deaf(config)).double(), torch.arange(5).expand(2, 5) < 3
    with maxmoe.record_routing(layer) as record:
        layer(tokens(2, 5), mask)
    with maxmoe.replay_routing(layer, record):  # the same experts, also without a mask
        layer(tokens(2, 5), mask)
    message = r"router Deaf must route to the experts that it gets in a replay, \[.*\] for token \d+, got \["
    with maxmoe.replay_routing(layer, record), pytest.raises(ValueError, match=message):
        layer(-tokens(2, 5), mask)
