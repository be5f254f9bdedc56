"""Small MoE layers with random parameters: options, results and gradients, of the layer and of the specification."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import MoE, MoEConfig, ZeroComputation, reference
from support.operator_calls import Result, assert_same, cotangents_of, floating

Options = dict[str, Any]
SIZES: Options = {"hidden_size": 7, "intermediate_size": 5, "num_experts": 6, "top_k": 3}
DEEPSEEK: Options = {
    "score_function": "sigmoid",
    "score_correction_bias": True,
    "num_groups": 3,
    "top_k_groups": 2,
    "routed_scaling_factor": 2.5,
    "num_shared_experts": 2,
    "shared_expert_gate": True,
    "load_balance_loss_weight": 0.3,
    "router_z_loss_weight": 0.2,
}
GPT_OSS: Options = {
    "score_function": "identity",
    "normalization": "softmax",
    "router_bias": True,
    "activation": "swigluoai",
    "activation_limit": 0.75,
    "expert_bias": True,
}
LLAMA4: Options = {
    "score_function": "sigmoid",
    "normalization": "none",
    "apply_weights_to": "input",
    "num_shared_experts": 1,
}
LONGCAT_FLASH: Options = {
    "zero_computation": ZeroComputation(zero=1, copy=3, constant=2),
    "score_correction_bias": True,
    "normalization": "none",
    "routed_scaling_factor": 6.0,
    "load_balance_loss_weight": 0.3,
}
EVERYTHING: Options = {
    "router_bias": True,
    "score_correction_bias": True,
    "expert_bias": True,
    "num_shared_experts": 2,
    "shared_expert_gate": True,
}
FAMILIES = {"plain": {}, "deepseek": DEEPSEEK, "gpt_oss": GPT_OSS, "llama4": LLAMA4, "longcat_flash": LONGCAT_FLASH}
COMPUTE = {
    "sparse": {},
    "buffer": {"buffer_factor": 0.6},
    "dense": {"implementation": "dense"},
    "capacity": {"implementation": "dense", "capacity_factor": 0.7},
    "wide_capacity": {"implementation": "dense", "capacity_factor": 2.5},
}
each_family = pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
each_compute = pytest.mark.parametrize("compute", COMPUTE.values(), ids=COMPUTE)


def make(dtype: torch.dtype = torch.float64, **options: Any) -> MoE:
    """A small layer with random values in all parameters, biases included."""
    torch.set_num_threads(1)  # more threads would only wait for each other at this size
    layer = MoE(MoEConfig(**{**SIZES, **options}), dtype=dtype)
    with torch.no_grad():
        for value in filter(Tensor.is_floating_point, layer.state_dict().values()):  # a table of experts is random
            value.copy_(0.5 * torch.randn(value.shape, dtype=torch.float64))
    return layer


def tokens(layer: MoE, *shape: int) -> Tensor:
    x = torch.randn(*(shape or (2, 5)), layer.config.hidden_size, dtype=torch.float64)
    return x.to(layer.router.weight.dtype)


def ids_for(layer: MoE, x: Tensor, token_mask: Tensor | None = None) -> dict[str, Tensor]:
    """Ids for a router that takes them, the same for every x of one shape; other ids than it knows for padding."""
    rule = layer.config.router_rule
    if rule.takes_ids is None:
        return {}
    numbers = torch.arange(x[..., 0].numel()).view(x.shape[:-1])
    ids = numbers * 7 % rule.num_ids if rule.num_ids else numbers // 2 % 2 - 1
    return {"router_inputs": ids if token_mask is None else ids.masked_fill(~token_mask, -9)}


def differentiate(outputs: tuple[Tensor, ...], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Result:
    """Runs backward as training does: the gradients are added to the leaves."""
    for leaf in leaves.values():
        leaf.grad = None
    roots = [(out, c) for out, c in zip(floating(outputs), cotangents, strict=True) if out.requires_grad]
    torch.autograd.backward(*zip(*roots, strict=True))
    return Result(tuple(out.detach() for out in outputs), {name: leaf.grad for name, leaf in leaves.items()})


def outcome(
    layer: MoE, x: Tensor, forward: Callable[..., Any] | None = None, token_mask: Tensor | None = None
) -> Result:
    """Outputs, and the gradients of x and of all parameters; `forward` is called in the place of the layer."""
    x = x.detach().requires_grad_()
    hidden_states, aux_loss, stats = (layer if forward is None else forward)(
        x, *([] if token_mask is None else [token_mask]), **ids_for(layer, x, token_mask)
    )[:3]
    outputs = (hidden_states, aux_loss, stats.tokens_per_expert, stats.dropped)
    return differentiate(outputs, {"x": x, **dict(layer.named_parameters())}, cotangents_of(outputs))


def specification(layer: MoE, x: Tensor, got: Result, token_mask: Tensor | None = None) -> Result:
    """The results of the reference in float64, for the same values and upstream gradients."""
    values = layer.state_dict().items()
    state = {name: value.double().requires_grad_() for name, value in values if value.is_floating_point()}
    x = x.detach().double().requires_grad_()
    ids = ids_for(layer, x, token_mask).get("router_inputs")
    outputs = reference.moe(x, layer.config, {**dict(values), **state}, token_mask, ids=ids)
    cotangents = [cotangent.double() for cotangent in cotangents_of(got.outputs)]
    return differentiate(outputs, {"x": x, **state}, cotangents)


def assert_meets_specification(
    layer: MoE, x: Tensor | None = None, relative: float = 1e-12, token_mask: Tensor | None = None
) -> None:
    """Compare with the reference; by default several sequences, no tokens, one token, and NaN in padding."""
    if x is None:
        for shape in ((3, 6), (0,), (1,)):
            assert_meets_specification(layer, tokens(layer, *shape), relative)
        token_mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1]]).bool()
        x = tokens(layer, 3, 6).masked_fill(~token_mask.unsqueeze(2), float("nan"))
    got = outcome(layer, x, token_mask=token_mask)
    assert set(got.gradients) - {"x"} == set(dict(layer.named_parameters()))
    assert_same(got, specification(layer, x, got, token_mask), relative)
