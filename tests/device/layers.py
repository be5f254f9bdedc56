"""MoE layers on a device beside the same layers on the CPU in float64.

    python -m device.layers --device cuda --out results.json

Outputs, auxiliary loss, counts and all gradients are compared, also with autocast, activation checkpointing,
torch.compile, replay, balancing, quantized experts and a CUDA graph.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import maxmoe
from device.cases import Cases, Values, main, within
from maxmoe import ExpertNorms, SiTU, ZeroComputation
from maxmoe.families.inkling import SharedExpertScores
from maxmoe.families.step3p7 import LimitedOutput
from maxmoe.nn import Selection
from maxmoe.quantization import FORMATS

Forward = Callable[..., Any]
SIZES: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 40, "num_experts": 8, "top_k": 2}
LOSSES: dict[str, Any] = {"load_balance_loss_weight": 0.01, "router_z_loss_weight": 1e-3}
BIASED: dict[str, Any] = {"score_function": "sigmoid", "score_correction_bias": True}
GROUPS: dict[str, Any] = {**BIASED, "num_groups": 4, "top_k_groups": 2}
# Each field of a config once; tests/nn has their combinations.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "sigmoid, groups, correction bias": {**GROUPS, "routed_scaling_factor": 2.5},
    "groups by their largest score": {"num_groups": 2, "top_k_groups": 1, "router": Selection(group_score="max")},
    "by logits, other groups at zero": {**GROUPS, "router": Selection(by="logits", other_groups="zero")},
    "sqrtsoftplus, no normalization": {"score_function": "sqrtsoftplus", "normalization": "none"},
    "softmax of the chosen, router bias": {
        **{"score_function": "identity", "normalization": "softmax", "router_bias": True}
    },
    "swigluoai": {"activation": "swigluoai", "activation_limit": 7.0, "expert_bias": True},
    "gelu, weights applied to the input": {"activation": "gelu", "apply_weights_to": "input"},
    "gelu_tanh, limit": {"activation": "gelu_tanh", "activation_limit": 0.5},
    "relu": {"activation": "relu"},
    "relu2, ungated": {"activation": "relu2", "gated": False},
    "limit of the output": {"activation": LimitedOutput(limit=0.5)},
    "situ, expert bias": {"activation": SiTU(gate_softcap=4.0, up_softcap=25.0), "expert_bias": True},
    "shared experts": {"num_shared_experts": 2, "shared_expert_gate": True},
    "scored shared experts": {**BIASED, "num_shared_experts": 2, "router": SharedExpertScores()},
    "latent, norms": {"latent_size": 24, "expert_norms": ExpertNorms(latent_in=True, latent_out=True, output=True)},
    "zero, copy and constant experts": {"zero_computation": ZeroComputation(zero=1, copy=2, constant=2)},
    "dense, capacity, balance by batch": {
        **{"implementation": "dense", "capacity_factor": 1.0, "load_balance_scope": "batch"}
    },
    "buffer, balance by step": {"buffer_factor": 0.8, "load_balance_scope": "step"},
    "64 experts, top 8": {"num_experts": 64, "top_k": 8},
}
# Relative to the norm. At these sizes and seeds, rounding of the scores must not select another expert.
LIMITS = {torch.float64: 1e-11, torch.float32: 1e-4}


def step(layer: nn.Module, x: Tensor, mask: Tensor | None = None, amp: torch.dtype | None = None) -> dict[str, Tensor]:
    """Run forward and backward of a layer; its gradients are added to the parameters."""
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, amp or torch.bfloat16, enabled=amp is not None):
        out, aux_loss, stats = layer(x, token_mask=mask)
    (0.1 * out.double().square().sum() + aux_loss).backward()
    results = {"output": out.detach(), "aux_loss": aux_loss.detach(), "x": x.grad, "counts": stats.tokens_per_expert}
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: value for name, value in {**results, **gradients}.items() if value is not None}


def compare(
    cases: Cases,
    dtype: torch.dtype = torch.float32,
    *,
    wrap: Callable[[maxmoe.MoE], nn.Module] = lambda layer: layer,
    padded: bool = False,
    amp: torch.dtype | None = None,
    limit: float | None = None,
    **options: Any,
) -> Values:
    """Compare a layer on the device with its copy on the CPU; `wrap` wraps the layer on the device."""
    torch.manual_seed(0)
    layer = maxmoe.MoE(maxmoe.MoEConfig(**{**SIZES, **LOSSES, **options})).double()
    for value in layer.state_dict().values():
        if not value.any():  # biases
            value.normal_(std=0.1)
    other = copy.deepcopy(layer).to(cases.device, dtype)
    x = torch.randn(3, 17, SIZES["hidden_size"], dtype=torch.float64)
    mask = torch.rand(3, 17) > 0.3 if padded else None
    with counted(layer, other):
        expected = step(layer, x, mask)
        got = step(wrap(other), x.to(cases.device, dtype), None if mask is None else mask.to(cases.device), amp)
    got = {name.removeprefix("_orig_mod.").removeprefix("layer."): value for name, value in got.items()}
    return within(limit or LIMITS[dtype], got, expected)


@contextmanager
def counted(*layers: maxmoe.MoE) -> Iterator[None]:
    """Count the load of a step, which a balance loss of scope "step" needs."""
    accumulators = [maxmoe.StatsAccumulator(layer) for layer in layers]
    yield
    del accumulators


class Checkpointed(nn.Module):
    """A layer under activation checkpointing."""

    def __init__(self, layer: maxmoe.MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Any:
        return checkpoint(self.layer, x, token_mask=token_mask, use_reentrant=False)


def recomputed(layer: maxmoe.MoE) -> maxmoe.MoE:
    maxmoe.set_recompute(layer, ("experts",))
    return layer


def replay(cases: Cases) -> Values:
    """The recorded routing gives the same bits."""
    torch.manual_seed(0)
    layer = maxmoe.MoE(maxmoe.MoEConfig(**SIZES)).to(cases.device)
    x = torch.randn(3, 17, SIZES["hidden_size"], device=cases.device)
    with maxmoe.record_routing(layer) as record:
        first = layer(x).hidden_states
    with maxmoe.replay_routing(layer, record):
        return {"ok": torch.equal(layer(x).hidden_states, first)}


def random_router(cases: Cases) -> Values:
    """The router that draws experts: every token has K of them."""
    torch.manual_seed(0)
    layer = maxmoe.MoE(maxmoe.MoEConfig(**SIZES, router="random")).to(cases.device)
    counts = layer(torch.randn(3, 16, SIZES["hidden_size"], device=cases.device)).stats.tokens_per_expert
    return {"ok": int(counts.sum()) == 3 * 16 * SIZES["top_k"]}


def balancing(cases: Cases, rule: str, rate: float) -> Values:
    """Correction biases after five steps, beside the CPU. One step of the rule "sign" moves a bias by `rate`."""
    torch.manual_seed(0)
    biased = {**SIZES, **BIASED, "correction_bias_rule": rule, "correction_bias_update_rate": rate}
    layer = maxmoe.MoE(maxmoe.MoEConfig(**biased))
    x, biases = torch.randn(4, 64, SIZES["hidden_size"]), []
    for each in (layer, copy.deepcopy(layer).to(cases.device)):
        accumulator = maxmoe.StatsAccumulator(each)
        for _ in range(5):
            each(x.to(next(each.parameters()).device)).hidden_states.sum().backward()
            accumulator.update()
        biases.append(each.router.score_correction_bias.cpu())
    difference = float((biases[0] - biases[1]).abs().max())
    return {"difference": difference, "largest": float(biases[0].abs().max()), "ok": difference < 1e-6}


def quantized(cases: Cases, format: str) -> Values:
    """Frozen quantized experts beside the same ones on the CPU, both in float32."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 64}
    layer = maxmoe.MoE(maxmoe.MoEConfig(**sizes, expert_bias=True)).requires_grad_(False)
    maxmoe.quantize_experts(layer, format)
    x = torch.randn(3, 17, 64)
    return within(1e-4, step(copy.deepcopy(layer).to(cases.device), x.to(cases.device)), step(layer, x))


def large(cases: Cases) -> tuple[maxmoe.MoE, Tensor]:
    """Return a layer in bfloat16 and its tokens."""
    torch.manual_seed(0)
    config = maxmoe.MoEConfig(
        hidden_size=256, intermediate_size=128, num_experts=16, top_k=4, load_balance_loss_weight=0.01
    )
    x = torch.randn(2, 64, 256, device=cases.device, dtype=torch.bfloat16, requires_grad=True)
    return maxmoe.MoE(config).to(cases.device, torch.bfloat16), x


def no_wait(cases: Cases) -> Values:
    """Run a layer while every wait of the host for the device is an error."""
    layer, x = large(cases)
    step(layer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"ok": True}


def cuda_graph(cases: Cases) -> Values:
    """Capture forward and backward of a layer; the replay gives the bits of a call."""
    layer, x = large(cases)

    def run() -> tuple[Tensor, Tensor]:
        x.grad = None
        layer.zero_grad()
        out, aux_loss, _ = layer(x)
        (out.float().square().sum() + aux_loss).backward()
        assert x.grad is not None
        return out.detach(), x.grad

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = [tensor.clone() for tensor in run()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    return {"ok": all(torch.equal(*pair) for pair in zip(got, expected, strict=True))}


def check_use(cases: Cases) -> None:
    """Check a layer with autocast, checkpointing and so on; compilation takes longest, so that it comes last."""
    group = "layers, used with"
    cases.run(group, "padding", compare, padded=True)
    cases.run(group, "padding, dense", compare, padded=True, implementation="dense")
    cases.run(group, "checkpoint", compare, wrap=Checkpointed)
    cases.run(group, "recomputed experts", compare, wrap=recomputed)
    cases.run(group, "autocast to bfloat16", compare, amp=torch.bfloat16, limit=3e-2)
    cases.run(group, "autocast to float16", compare, amp=torch.float16, limit=1e-2)
    cases.run(group, "replay", replay)
    cases.run(group, "random router", random_router)
    cases.run(group, "balancing by sign", balancing, "sign", 1e-2)
    cases.run(group, "balancing by quantile", balancing, "quantile", 0.5)
    if cases.is_cuda:
        cases.run(group, "layer, no wait in forward and backward", no_wait)
        cases.run(group, "layer, forward and backward in a CUDA graph", cuda_graph)
    backend = "aot_eager" if cases.is_tiny else "inductor"
    wrap = functools.partial(torch.compile, fullgraph=True, backend=backend)
    cases.run(group, "torch.compile(fullgraph=True)", compare, wrap=wrap)


def check(cases: Cases) -> None:
    """Check layers."""
    variants = ["default", "shared experts"] if cases.is_tiny else list(VARIANTS)
    for dtype in [torch.float32] if cases.is_tiny else LIMITS:
        for name in variants:
            cases.run(f"layers, {str(dtype).removeprefix('torch.')}", name, compare, dtype, **VARIANTS[name])
    for format in list(FORMATS)[: 1 if cases.is_tiny else None]:
        cases.run("quantized experts", format, quantized, format)
    check_use(cases)


if __name__ == "__main__":
    main("layers", check)
