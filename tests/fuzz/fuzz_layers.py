"""Compares layers of random configs, sizes, dtypes, strides and padding with the specification in float64.

Outputs, losses, statistics and all gradients must equal `maxmoe.reference` up to rounding: some eps of the largest
value, plus the change of the reference when its arguments are rounded differently. If this changes the routing, nothing
is compared.
"""

import math
from dataclasses import replace
from random import Random
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor

import maxmoe
from maxmoe import ExpertNorms, MoE, MoEConfig, ZeroComputation, ops, reference
from maxmoe.config import moe_config as config
from maxmoe.families.inkling import SharedExpertScores
from maxmoe.families.muse_spark import ScaledLogits
from maxmoe.families.step3p7 import LimitedOutput
from maxmoe.families.zaya import RouterMLP
from maxmoe.nn import Selection
from support import activations
from support.moe_layers import differentiate
from support.operator_calls import Result, cotangents_of, floating, strided

DTYPES = [torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 3, 5, 7, 8, 13, 16, 17, 24, 31, 33, 64, 67]
LAYOUTS = ["contiguous", "contiguous", "transposed", "columns", "rows"]
MAX = 2.0**15  # with room for partial sums


def draw_config(random: Random) -> MoEConfig:
    """Draw every field."""

    def sometimes(value: Any, otherwise: Any, share: float = 0.4) -> Any:
        return value if random.random() < share else otherwise

    num_groups = random.choice([1, 1, 2, 3, 4, 8])
    num_experts = num_groups * random.choice([1, 2, 3, 5, 8])
    top_k_groups = random.randint(1, num_groups)
    weights_to = random.choice(get_args(config.WeightsTarget))
    kinds = draw_zero_computation_experts(random, weights_to) if num_groups == 1 else None
    reachable = num_experts // num_groups * top_k_groups + (kinds.count if kinds else 0)
    correction = random.random() < 0.4
    num_shared_experts = sometimes(random.randint(1, 3), 0)
    score_function = random.choice(get_args(config.ScoreFunction))
    top_k = random.randint(1, min(reachable, random.choice([1, 2, 4, 40])))
    normalization = random.choice(get_args(config.Normalization))
    can_be_scored = (score_function, normalization, weights_to) == ("sigmoid", "sum", "output")
    scored = num_shared_experts > 0 and can_be_scored and random.random() < 0.5
    has_quantiles = correction and num_groups == 1 and score_function in ("sigmoid", "softmax") and top_k < reachable
    rule = random.choice(get_args(config.CorrectionBiasRule)) if has_quantiles else "sign"
    return MoEConfig(
        hidden_size=random.choice(WIDTHS),
        intermediate_size=random.choice(WIDTHS),
        num_experts=num_experts,
        top_k=top_k,
        **draw_latent_experts(random, weights_to),
        zero_computation=kinds,
        score_function=score_function,
        router_bias=random.random() < 0.4,
        score_correction_bias=correction,
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        normalization=normalization,
        routed_scaling_factor=random.choice([1.0, 1, 0.25, 2.5]),
        apply_weights_to=weights_to,
        router=draw_router(random, rule, is_scored=scored),
        **draw_activation(random, num_shared_experts),
        expert_bias=random.random() < 0.4,
        num_shared_experts=num_shared_experts,
        shared_expert_gate=num_shared_experts > 0 and not scored and random.random() < 0.5,
        **draw_losses(random),
        correction_bias_rule=rule,
        correction_bias_update_rate=sometimes(1e-3, 0.0) if correction else 0.0,
        **draw_implementation(random, num_experts),
    )


def draw_router(random: Random, rule: str, *, is_scored: bool) -> Any:
    """Draw a router, often the plain one."""
    if is_scored:
        return SharedExpertScores(scale=random.random() < 0.5)
    match random.choice(["learned"] * 5 + ["random", "scaled", "mlp", "selection", "selection"]):
        case "scaled":
            return ScaledLogits(scale=0.3)
        case "mlp":
            return RouterMLP(
                hidden_size=random.choice(WIDTHS),
                takes_state=random.random() < 0.6,
                norm_eps=random.choice([1e-5, 0.1]),
            )
        case "selection":
            return Selection(
                by=random.choice(["scores", "logits"]) if rule == "sign" else "scores",
                group_score=random.choice(["top2", "max"]),
                other_groups=random.choice(["excluded", "zero"]),
            )
        case name:
            return name


def draw_activation(random: Random, num_shared_experts: int) -> dict[str, Any]:
    gated = random.random() < 0.75
    fields = activations.fields(random.choice(activations.OF_CONFIGS if gated else activations.PLAIN))
    if num_shared_experts and isinstance(fields["activation"], LimitedOutput):
        fields["activation"] = replace(fields["activation"], shared_limit=random.choice([None, 0.6]))
    return {**fields, "gated": gated}


def draw_implementation(random: Random, num_experts: int) -> dict[str, Any]:
    implementation = random.choice(get_args(config.Implementation))
    factor = min(random.choice([0.1, 0.5, 0.8, 1.0, 1.25, 2, 4.0]), num_experts) if random.random() < 0.4 else None
    if implementation == "dense":
        return {"implementation": "dense", "capacity_factor": factor}
    return {"buffer_factor": factor, "overflow": random.choice(get_args(config.Overflow)) if factor else "drop"}


def draw_latent_experts(random: Random, weights_to: str) -> dict[str, Any]:
    """Draw the width of the experts' rows, often the width of the tokens, and norms."""
    is_latent = random.random() < 0.25
    return {
        "latent_size": random.choice(WIDTHS) if is_latent else None,
        "expert_norms": ExpertNorms(
            latent_in=is_latent and random.random() < 0.3,
            latent_out=is_latent and random.random() < 0.3,
            output=weights_to == "output" and random.random() < 0.2,
            eps=random.choice([1e-5, 0.1]),
            output_eps=random.choice([1e-8, 0.1]),
        ),
    }


def draw_losses(random: Random) -> dict[str, Any]:
    return {
        "load_balance_loss_weight": random.choice([0.01, 0.3, 1]) if random.random() < 0.6 else 0.0,
        "load_balance_scope": random.choice(get_args(config.LoadBalanceScope)),
        "router_z_loss_weight": random.choice([0.001, 0.2]) if random.random() < 0.4 else 0.0,
    }


def draw_zero_computation_experts(random: Random, weights_to: str) -> ZeroComputation:
    """Draw how many experts compute no product: often none."""
    names = ["zero", "copy", *(["constant"] if weights_to == "output" else [])]
    return ZeroComputation(**{name: random.choice([0, 1, 3, 8]) if random.random() < 0.5 else 0 for name in names})


def draw_layer(random: Random, dtype: torch.dtype) -> MoE:
    """Draw parameters of any strides, of which some are frozen."""
    layer = MoE(draw_config(random), dtype=dtype)
    if layer.config.load_balance_scope == "step":
        maxmoe.StatsAccumulator(layer)  # a step of one micro-batch
    scale = random.choice([0.1, 0.5, 0.5])
    for value in layer.state_dict().values():
        value.copy_(scale * torch.randn(value.shape, dtype=torch.float64))
    if random.random() < 0.1:  # every expert is as good as every other
        layer.router.weight.data.zero_()
    for parameter in layer.parameters():
        if random.random() < 0.3:
            parameter.data = strided(parameter.data, random.choice(LAYOUTS))
        parameter.requires_grad_(random.random() < 0.9)
    return layer


def draw_tokens(random: Random, layer: MoE, dtype: torch.dtype) -> Tensor:
    leading = random.choice([(), (1,), (2,), (3,), (2, 2), (0,), (1, 3)])
    length = random.choice([0, 1, 2, 3, 5, 8, 8, 13, 40])
    x = random.choice([0.3, 1.0, 1.0]) * torch.randn(*leading, length, layer.config.hidden_size, dtype=torch.float64)
    if x.numel() and random.random() < 0.1:  # all tokens go to the same experts
        x = x.flatten(0, -2)[:1].repeat(x.numel() // x.shape[-1], 1).view(x.shape)
    return strided(x.to(dtype), random.choice(LAYOUTS))


def draw_mask(random: Random, x: Tensor) -> Tensor | None:
    """Draw a mask of tokens, and often fill the padding with NaN or infinity."""
    match random.choice(["no mask", "no mask", "no mask", "scattered", "tail", "all", "none"]):
        case "no mask":
            return None
        case "scattered":
            mask = torch.rand(x.shape[:-1]) < 0.6
        case "tail":
            mask = torch.rand(*x.shape[:-2], 1) * x.shape[-2] > torch.arange(x.shape[-2])
        case all_or_none:
            mask = torch.full(x.shape[:-1], all_or_none == "all")
    if random.random() < 0.7:
        x[~mask] = random.choice([math.nan, math.inf])
    return mask


def leaves_of(layer: MoE, x: Tensor) -> dict[str, Tensor]:
    """Tokens, and if the layer takes one, a state of the router before: the same random values at every call."""
    leaves = {"x": x.detach()}
    if layer.config.router_rule.takes_state:
        generator = torch.Generator().manual_seed(1)
        shape = (*x.shape[:-1], layer.config.router_rule.state_size)
        leaves["router_state"] = torch.randn(shape, generator=generator, dtype=torch.float64).to(x.dtype)
    return leaves


def run_layer(layer: MoE, x: Tensor, token_mask: Tensor | None) -> Result:
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves_of(layer, x).items()}
    # The noise of the random router is replaced by the logits, which makes it the learned router.
    noise = patch("maxmoe.nn.router.rand_of_tokens", lambda logits, _tokens: logits.detach())
    with noise, patch("torch.special.ndtri", Tensor.detach):
        hidden_states, aux_loss, stats = layer(token_mask=token_mask, **leaves)[:3]
    outputs = (hidden_states, aux_loss, stats.router_entropy, stats.tokens_per_expert, stats.dropped)
    assert hidden_states.requires_grad, "hidden_states have no gradient"
    return differentiate(outputs, {**leaves, **dict(layer.named_parameters())}, cotangents(outputs))


def cotangents(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return cotangents_of(outputs[:2]) + [torch.zeros_like(out) for out in floating(outputs[2:])]


def run_reference(layer: MoE, x: Tensor, mask: Tensor | None, got: Result, noise: float = 0.0, seed: int = 0) -> Result:
    """Run the specification in float64; with noise, on arguments that are rounded otherwise."""
    given = {"router": layer.config.router_rule if layer.config.router != "random" else "learned"}
    limit, activation = layer.config.activation_limit, layer.config.activation
    if isinstance(activation, LimitedOutput):
        limits = {name: value for name, value in vars(activation).items() if name.endswith("limit") and value}
        given["activation"] = replace(activation, **{name: value * (1 + noise) for name, value in limits.items()})
    elif limit is not None:
        given["activation_limit"] = limit * (1 + noise)
    settings = MoEConfig(**{**vars(layer.config), **given})
    state, generator = {**leaves_of(layer, x), **layer.state_dict()}, torch.Generator().manual_seed(seed)
    # The router is computed in float32 at least, from the values as they are.
    fine = min(abs(noise), 16 * torch.finfo(torch.float32).eps)
    for name, value in state.items():
        exact = value.detach().double()
        scale = math.copysign(fine, noise) if name == "x" or name.startswith("router") else noise
        noisy = exact * (1 + scale * torch.randn(exact.shape, generator=generator, dtype=torch.float64))
        state[name] = noisy.requires_grad_()
    before = state.get("router_state")
    hidden_states, aux_loss, load, dropped = reference.moe(state["x"], settings, state, mask, before)
    is_token = torch.ones(x.shape[:-1], dtype=torch.bool) if mask is None else mask
    previous = None if before is None else before[is_token]
    logits, *_ = reference.layer.routing(state["x"][is_token], settings, state, previous)
    scores = reference.routing.scores(
        logits, "softmax" if settings.score_function == "identity" else settings.score_function
    )
    probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    entropy = torch.special.entr(probabilities).sum() / max(len(logits), 1)
    outputs = (hidden_states, aux_loss, entropy.detach(), load, dropped)
    if not (hidden_states.requires_grad or aux_loss.requires_grad):  # all slots are dropped
        return Result(outputs, dict.fromkeys(state))
    return differentiate(outputs, state, [cotangent.double() for cotangent in cotangents(got.outputs)])


def pairs(got: Result, expected: Result) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Pairs of tensors that must be close, by name."""
    names = ("hidden_states", "aux_loss", "router_entropy")
    values: dict[str, Any] = dict(zip(names, zip(got.outputs, expected.outputs, strict=True), strict=False))
    gradients = {f"gradient of {name}": (grad, expected.gradients[name]) for name, grad in got.gradients.items()}
    return values | gradients


def one_case(random: Random) -> str:
    """Compare one layer, and return the outcome."""
    torch.manual_seed(random.getrandbits(60))
    torch.set_num_threads(random.choice([1, 1, 2]))
    dtype = random.choice(DTYPES)
    layer = draw_layer(random, dtype)
    x = draw_tokens(random, layer, dtype)
    mask = draw_mask(random, x)
    with ops.force_aten(random.random() < 0.3):
        got = run_layer(layer, x, mask)
    eps = torch.finfo(dtype).eps
    expected = run_reference(layer, x, mask, got)
    # Noise of both signs, because a preactivation may be near the limit or the 0 of a relu, where the gradient jumps.
    others = [run_reference(layer, x, mask, got, *noise) for noise in [(4 * eps, 0), (-4 * eps, 0), (4 * eps, 1)]]
    if any(not torch.equal(one, two) for other in others for one, two in zip(*integers(expected, other), strict=True)):
        return "another routing is as good"
    if dtype == torch.float16 and max(map(largest, [*floating(expected.outputs), *expected.gradients.values()])) > MAX:
        return "too large for float16"
    for one, two in zip(*integers(got, expected), strict=True):
        assert torch.equal(one, two), (
            f"{layer.config} {dtype} {tuple(x.shape)}: got {one.tolist()}, expected {two.tolist()}"
        )
    compare(layer, got, expected, others)
    return str(dtype)


def compare(layer: MoE, got: Result, expected: Result, others: list[Result]) -> None:
    """Compare the pairs."""
    dtype = got.outputs[0].dtype
    eps, wide_eps = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    frozen = {f"gradient of {name}" for name, value in layer.named_parameters() if not value.requires_grad}
    changed = [pairs(other, expected) for other in others]
    # Terms of this size cancel in the gradient of weights that are scaled to sum one, and of a balanced loss.
    terms = max(largest(value) for value in [expected.outputs[1], *expected.gradients.values()])
    for name, (value, exact) in pairs(got, expected).items():
        where = f"{layer.config} {dtype} {tuple(got.outputs[0].shape)}: {name}"
        if name in frozen:
            assert value is None, f"{where} is frozen"
            continue
        if exact is None:
            assert largest(value) == 0, f"{where} is {largest(value)}, and not 0"
            continue
        assert value is not None and value.shape == exact.shape, f"{where} has another shape"
        error, slack = largest(value - exact), max(largest(change[name][0] - exact) for change in changed)
        bound = (128 if dtype.itemsize > 2 else 8) * eps * largest(exact) + 8 * slack + 512 * wide_eps * terms
        assert error <= bound, f"{where}: error {error:.3e}, allowed {bound:.3e}"


def integers(*results: Result) -> list[list[Tensor]]:
    return [[out for out in result.outputs if not out.is_floating_point()] for result in results]


def largest(values: Tensor | None) -> float:
    return 0.0 if values is None or not values.numel() else float(values.detach().abs().max())
