"""Inputs, custom parts and routings that a layer refuses, each by name and before experts are computed."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxmoe
from maxmoe import ExpertNorms, MoE, MoEConfig, SiTU
from maxmoe.families.deepseek_v4 import HashRouting
from maxmoe.families.emo import DocumentPools
from maxmoe.families.inkling import SharedExpertScores
from maxmoe.families.zaya import RouterMLP
from maxmoe.nn import Routing, load_balance_loss
from maxmoe.nn.router import Router
from support.documented import documented
from support.moe_layers import EVERYTHING, SIZES, ZAYA, Options, each_compute, make, tokens

HASH: Options = {"router": HashRouting(num_ids=5)}
POOLS: Options = {"router": DocumentPools(min_size=4, max_size=4)}
X, IDS = torch.zeros(2, 5, 7).double(), "router_inputs must be ids of tokens, which the router takes, "
OF_SHAPE = "integer of shape (2, 5), got "
WRONG_INPUTS: dict[str, tuple[Options, dict[str, Any], str]] = {
    "no sequence": ({}, {"x": X[0, 0]}, "x must have shape [..., S, hidden_size (7)], got (7,)"),
    "width": ({}, {"x": torch.ones(2, 5, 8)}, "x must have shape [..., S, hidden_size (7)], got (2, 5, 8)"),
    "bfloat16": ({}, {"x": X.bfloat16()}, "dtype of the parameters (torch.float64) outside of autocast, got torch.bf"),
    "float mask": ({}, {"token_mask": X[..., 0]}, "must be bool of shape (2, 5), got torch.float64 of shape (2, 5)"),
    "shorter mask": ({}, {"token_mask": torch.ones(2, 4).bool()}, "of shape (2, 5), got torch.bool of shape (2, 4)"),
    "no state": (ZAYA, {}, "router_state must be given to a layer whose router takes a state, got None"),
    "state": ({"router": RouterMLP(hidden_size=4)}, {"router_state": X}, "None for a router that takes no state, got"),
    "shape of the state": (ZAYA, {"router_state": X[..., :3]}, "(2, 5, 4), the last dim the size of the state, got"),
    "dtype of the state": (ZAYA, {"router_state": X[..., :4].long()}, "must be floating of shape (2, 5, 4)"),
    "no ids": (HASH, {}, f"{IDS}{OF_SHAPE}None"),
    "ids": ({}, {"router_inputs": X[..., 0].long()}, "router_inputs must be None for a router that takes no ids, got"),
    "float ids": (HASH, {"router_inputs": X[..., 0]}, f"{IDS}{OF_SHAPE}torch.float64 of shape (2, 5)"),
    "a mask as ids": (POOLS, {"router_inputs": torch.ones(2, 5).bool()}, IDS.replace("tokens", "documents")),
    "large ids": (HASH, {"router_inputs": torch.full((2, 5), 5)}, f"{IDS}in [0, 5), got 5"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "inputs", "message"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_wrong_inputs(options: Options, inputs: dict[str, Any], message: str) -> None:
    layer = make(**options)
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(**{"x": X, **inputs})


@each_compute
def test_another_device(compute: Options) -> None:
    layer = make(**EVERYTHING, **compute)
    with pytest.raises(ValueError, match=r"must be on the device of .*\(meta\), got cpu"):
        layer(X.to("meta"))


# Custom parts

WRONG_PARTS: list[tuple[Options, Options, type[Exception], str]] = [
    ({}, {"router": torch.softmax}, TypeError, "router must be a torch.nn.Module, got builtin_function_or_method"),
    ({"router_bias": True}, {"router": nn.Identity()}, ValueError, "router_bias must be False .*, got True"),
    ({"score_correction_bias": True}, {"router": nn.Identity()}, ValueError, "score_correction_bias must be False"),
    (
        {"router": SharedExpertScores(), "score_function": "sigmoid", "num_shared_experts": 1},
        {"router": nn.Identity()},
        ValueError,
        r"must be a name with a custom router, got SharedExpertScores\(scale=True\)",
    ),
    ({}, {"activation": "silu"}, TypeError, "activation must be a function of gate and up, got 'silu'"),
    ({"activation_limit": 7.0}, {"activation": min}, ValueError, "activation_limit must be None .*, got 7.0"),
    (
        {"activation": SiTU(gate_softcap=1.5, up_softcap=0.8)},
        {"activation": min},
        ValueError,
        r"must be a name with a custom activation, got SiTU\(",
    ),
    ({}, {"balance_loss": load_balance_loss}, ValueError, "needs load_balance_loss_weight > 0, got 0"),
    ({"load_balance_loss_weight": 0.1}, {"balance_loss": 0.1}, TypeError, "must be a function .*, got 0.1"),
    (
        {"load_balance_loss_weight": 0.1, "load_balance_scope": "step"},
        {"balance_loss": load_balance_loss},
        ValueError,
        "'sequence' or 'batch', got 'step'",
    ),
]


@pytest.mark.parametrize(("fields", "parts", "error", "message"), WRONG_PARTS)
def test_parts_that_contradict_the_config(
    fields: Options, parts: Options, error: type[Exception], message: str
) -> None:
    config = MoEConfig(**SIZES, **fields)
    with pytest.raises(error, match=message):
        MoE(config, **parts)


def test_dense_blocks_do_not_become_experts_with_a_norm() -> None:
    config = MoEConfig(**SIZES, expert_norms=ExpertNorms(output=True))
    with pytest.raises(ValueError, match="from_dense needs experts without norms, got ExpertNorms"):
        MoE.from_dense(config, torch.ones(5, 7), torch.ones(5, 7), torch.ones(7, 5))


@pytest.mark.parametrize(
    ("part", "function", "error", "message"),
    [
        ("activation", lambda gate, up: 1.0, TypeError, "activation must return a tensor, got float"),
        (
            "activation",
            lambda gate, up: up[:, 1:],
            ValueError,
            r"of shape \(\d+, 5\), as it gets, got torch.float64 of shape \(\d+, 4\)",
        ),
        ("activation", lambda gate, up: up.float(), ValueError, r"must return torch.float64 .*, got torch.float32"),
        ("balance_loss", lambda *_, **__: torch.ones(3), ValueError, r"must return a tensor .*got one of shape \(3,\)"),
        ("balance_loss", lambda *_, **__: 0.5, ValueError, "balance_loss must return a tensor .*got float"),
    ],
)
def test_functions_with_wrong_results(part: str, function: Any, error: type[Exception], message: str) -> None:
    config = MoEConfig(**SIZES, load_balance_loss_weight=0.3)
    with pytest.raises(error, match=message):
        MoE(config, dtype=torch.float64, **{part: function})(X)


# Custom routers


class Wrong(nn.Module):
    """A correct router, whose result is changed."""

    def __init__(self, change: Callable[[Routing], Any], config: MoEConfig) -> None:
        super().__init__()
        self.change, self.inner = change, Router(config)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Any:
        return self.change(self.inner(x, token_mask))


def changed(field: str, change: Callable[[Tensor], Any]) -> Callable[[Routing], Routing]:
    return lambda routing: routing._replace(**{field: change(getattr(routing, field))})


def with_value(field: str, value: float, **others: Any) -> Callable[[Routing], Routing]:
    def change(routing: Routing) -> Routing:
        tensor = getattr(routing, field).clone()
        tensor[3, 1] = value
        return routing._replace(**{field: tensor}, **others)

    return change


OF_TOKENS = r"\(tokens \(10\), top_k \(3\)\)"
WRONG_ROUTINGS: list[tuple[Callable[[Routing], Any], type[Exception], str]] = [
    (lambda r: r.top_k, TypeError, r"router Wrong must return maxmoe.nn.Routing, got TopK"),
    (changed("experts", lambda t: t[:, :1]), ValueError, rf"experts .* {OF_TOKENS}, got \(10, 1\)"),
    (changed("weights", lambda t: t[1:]), ValueError, rf"weights .* {OF_TOKENS}, got \(9, 3\)"),
    (changed("probabilities", lambda t: t[:, 1:]), ValueError, r"experts \(6\)\), got \(10, 5\)"),
    (with_value("experts", 6), ValueError, r"in \[-1, number of experts \(6\)\), got 6"),
    (with_value("experts", -2), ValueError, r"in \[-1, number of experts \(6\)\), got -2"),
    (with_value("experts", -1, is_unpadded=True), ValueError, "must set is_unpadded=False for ids of -1, as"),
    (with_value("weights", torch.nan), ValueError, r"must be finite, got \[.*nan.*\] for token 3"),
    (with_value("probabilities", torch.nan), ValueError, r"probabilities .* finite, got \[.*nan.*\] for token 3"),
    (changed("weights", Tensor.detach), ValueError, r"must require a gradient, since its parameters do"),
    (changed("token_mask", lambda _: None), ValueError, r"must pass token_mask to Routing.of"),
    (changed("logits", lambda _: None), ValueError, r"router_z_loss_weight \(0.1\) needs the logits .*, got None"),
    (changed("logits", lambda t: t[:5]), ValueError, r"logits .* \(tokens \(10\), number of .*\), got \(5, 6\)"),
    (changed("experts", Tensor.int), ValueError, r"experts of router Wrong must be int64, got torch.int32"),
    (changed("weights", Tensor.bfloat16), ValueError, "must be float32 or float64, got torch.bfloat16: see Routing.of"),
    (
        lambda r: r._replace(token_losses=torch.tensor([0.0] * 3 + [torch.inf] * 7)),
        ValueError,
        "token_losses of router Wrong must be finite, got inf for token 3",
    ),
    (lambda r: r._replace(token_losses=torch.ones(5)), ValueError, r"token_losses .* \(tokens \(10\)\), got \(5,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG_ROUTINGS)
def test_a_wrong_routing(change: Any, error: type[Exception], message: str) -> None:
    config = MoEConfig(**SIZES, router_z_loss_weight=0.1)
    layer, called = MoE(config, router=Wrong(change, config), dtype=torch.float64), []
    layer.experts.register_forward_pre_hook(lambda *_: called.append(None))
    with pytest.raises(error, match=message):
        layer(X, torch.ones(2, 5, dtype=torch.bool))
    assert not called


def test_parts_of_a_routing_that_do_not_fit() -> None:
    ones, experts = torch.ones(2, 5, 3), torch.zeros(2, 5, 3, dtype=torch.int64)
    right = {"experts": experts, "weights": ones, "probabilities": torch.ones(2, 5, 6)}
    Routing.of(**right)
    for name, wrong in {"weights": ones[:1], "probabilities": ones[0], "logits": ones.mT, "token_losses": ones}.items():
        shape = {"logits": r"\(2, 3\)", "token_losses": r"\(2, 5, 3\)"}.get(name, r"\([15,]+ ?5?\)")
        with pytest.raises(ValueError, match=rf"{name} must have the leading dims of experts \(2, 5\), got {shape}"):
            Routing.of(**{**right, name: wrong})


class OfSequences(Router):
    """A subclass of the router with other logits; wrong ids if an entry of x is large."""

    def forward(self, x: Tensor, token_mask: Tensor | None = None, experts: Tensor | None = None) -> Routing:
        assert x.dim() == 3
        routing = super().forward(-x, token_mask, experts)
        return routing._replace(experts=routing.experts + 6) if x[0, 0, 0] > 100 else routing


def test_a_subclass_of_the_router_is_one_of_ones_own() -> None:
    config = MoEConfig(**SIZES)
    layer = MoE(config, router=OfSequences(config), dtype=torch.float64).double()
    layer(X)
    with pytest.raises(ValueError, match=r"ids of router OfSequences must be in \[-1, number of experts \(6\)\)"):
        layer(X + 200)
    with pytest.raises(ValueError, match="router_bias must be False with a custom router, got True"):
        MoE(dataclasses.replace(config, router_bias=True), router=OfSequences(config))


def test_a_router_of_the_library_has_the_config_of_the_layer() -> None:
    class Renamed(Router):
        """A subclass of the router with the same routing."""

    config = MoEConfig(**SIZES, score_correction_bias=True)
    layer = MoE(config, router=Renamed(config))
    assert layer.balanced_router is layer.router
    message = "score_function of the config of the router must be 'softmax' as in the config of the layer, got 'sig"
    with pytest.raises(ValueError, match=message):
        MoE(config, router=Renamed(dataclasses.replace(config, score_function="sigmoid")))


def test_a_router_that_ignores_a_record() -> None:
    class Deaf(documented("router", "TopK")):  # type: ignore[misc]
        def forward(self, x: Tensor, token_mask: Tensor | None = None, experts: Tensor | None = None) -> Any:
            return super().forward(x, token_mask)

    config = MoEConfig(**SIZES)
    layer, mask = MoE(config, router=Deaf(config)).double(), torch.arange(5).expand(2, 5) < 3
    x = tokens(make(), 2, 5)
    with maxmoe.record_routing(layer) as record:
        layer(x, mask)
    with maxmoe.replay_routing(layer, record):  # the same experts, also without a mask
        layer(x, mask)
    message = r"router Deaf must route to the experts that it gets in a replay, \[.*\] for token \d+, got \["
    with maxmoe.replay_routing(layer, record), pytest.raises(ValueError, match=message):
        layer(-x, mask)
