"""Small layers with random parameters: a table of named configs, results and gradients, and the specification's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import ExpertNorms, MoE, MoEConfig, ZeroComputation, reference
from maxmoe.families.cohere2_moe import ConstantSharedWeight
from maxmoe.families.deepseek_v4 import HashRouting
from maxmoe.families.emo import DocumentPools
from maxmoe.families.gemma4 import NormedTokens
from maxmoe.families.inkling import SharedExpertScores
from maxmoe.families.laguna import SoftcappedLogits
from maxmoe.families.muse_spark import ScaledLogits
from maxmoe.families.step3p7 import LimitedOutput
from maxmoe.families.zaya import RouterMLP
from maxmoe.nn import Selection
from maxmoe.nn.sum_normalization import SumNormalization
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
LOSSES: Options = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}
EVERYTHING: Options = {
    "router_bias": True,
    "score_correction_bias": True,
    "expert_bias": True,
    "num_shared_experts": 2,
    "shared_expert_gate": True,
}
FAMILIES = {"plain": {}, "deepseek": DEEPSEEK, "gpt_oss": GPT_OSS, "llama4": LLAMA4, "longcat_flash": LONGCAT_FLASH}
MUSE_SPARK: Options = {
    "latent_size": 4,
    "expert_norms": ExpertNorms(latent_in=True, output=True),
    "router": ScaledLogits(scale=0.25),
    "score_function": "sigmoid",
    "score_correction_bias": True,
}
KIMI_K3: Options = {"latent_size": 4, "expert_norms": ExpertNorms(latent_out=True), "num_shared_experts": 1}
INKLING: Options = {
    "score_function": "sigmoid",
    "num_shared_experts": 2,
    "router": SharedExpertScores(),
    "score_correction_bias": True,
    "routed_scaling_factor": 2.5,
}
ZAYA: Options = {
    "router": RouterMLP(hidden_size=4, takes_state=True),
    "top_k": 1,
    "normalization": "none",
    "zero_computation": ZeroComputation(zero=1),
    "score_correction_bias": True,
}
GROUPS: Options = {"num_groups": 3, "top_k_groups": 2, "top_k": 4}
# So low that the scores of some experts in the best groups are below zero.
BIASED: Options = {"score_function": "sigmoid", "score_correction_bias": True, "correction_bias": -0.7}
POOLS = DocumentPools(min_size=4, max_size=4)
# Named configs, one at least for each rule that a layer can have. tests/fuzz draws every other option.
# "correction_bias", which is no field, is added to the correction bias of the layer.
LAYERS: dict[str, Options] = {
    **FAMILIES,
    "everything": EVERYTHING,
    # selection
    "by logits": {**BIASED, "router": Selection(by="logits")},
    "by logits in groups": {**BIASED, **GROUPS, "router": Selection(by="logits")},
    "zero": {**BIASED, **GROUPS, "router": Selection(other_groups="zero")},
    "zero by the best": {**GROUPS, "router": Selection(group_score="max", other_groups="zero")},
    "zero by logits": {**BIASED, **GROUPS, "router": Selection(by="logits", other_groups="zero")},
    "hash": {"score_function": "sqrtsoftplus", "router": HashRouting(num_ids=5)},
    "pools": {"router": POOLS},
    "pools by sigmoid": {"score_function": "sigmoid", "router_bias": True, "router": POOLS},
    "pools by logits": {"score_function": "identity", "normalization": "softmax", "router": POOLS},
    "all to three": {"score_correction_bias": True, "correction_bias": [0.0, 0.0, 30.0, 30.0, 30.0, 0.0]},
    "all to one": {
        **{"top_k": 1, "normalization": "none", "score_correction_bias": True},
        "correction_bias": [0.0, 30.0, 0.0, 0.0, 0.0, 0.0],
    },
    # other routers
    "scaled logits": {"router": ScaledLogits(scale=0.25)},
    "softcapped logits": {"router": SoftcappedLogits(softcap=0.5), "router_bias": True},
    "normed tokens": {"router": NormedTokens(eps=0.1)},
    "sum and epsilon": {"router": SumNormalization(eps=0.25), "routed_scaling_factor": 2.5},
    "sum and minimum": {"router": SumNormalization(minimum=1.5), "score_function": "sigmoid"},
    "hidden layers": {"router": RouterMLP(hidden_size=4), "router_bias": True},
    "zaya": ZAYA,
    # shared experts
    "inkling": INKLING,
    "inkling, zero computation": {
        **INKLING,
        "router": SharedExpertScores(scale=False),
        "router_bias": True,
        "zero_computation": ZeroComputation(copy=2, constant=1),
    },
    "inkling, latent, no gate": {**INKLING, "latent_size": 4, "gated": False, "activation": "relu2"},
    "inkling, one expert": {**INKLING, "top_k": 1},
    "half of the shared experts": {"router": ConstantSharedWeight(weight=0.5), "num_shared_experts": 2},
    "limited output": {"activation": LimitedOutput(limit=0.25), "num_shared_experts": 1},
    "limited shared output": {"activation": LimitedOutput(limit=0.5, shared_limit=0.125), "num_shared_experts": 1},
    # latent experts and norms
    "latent": {"latent_size": 4, "zero_computation": ZeroComputation(copy=2, constant=1), **EVERYTHING},
    "latent, one": {"latent_size": 1, "expert_bias": True},
    "latent, wide": {"latent_size": 9},
    "latent, weights on the input": {"latent_size": 4, "apply_weights_to": "input", "num_shared_experts": 1},
    "muse_spark": MUSE_SPARK,
    "kimi_k3": KIMI_K3,
    "norms of tokens and sum": {"expert_norms": ExpertNorms(input=True, sum=True), "num_shared_experts": 1},
    "norm of outputs": {"expert_norms": ExpertNorms(output=True), "expert_bias": True},
    # experts without a computation
    "zero experts": {"zero_computation": ZeroComputation(zero=2)},
    "copies": {"zero_computation": ZeroComputation(copy=3), "num_shared_experts": 1},
    "constants": {"zero_computation": ZeroComputation(constant=2), "score_correction_bias": True},
    "zero and constants": {"zero_computation": ZeroComputation(zero=2, constant=2)},
    "copies, weights on the input": {"zero_computation": ZeroComputation(copy=4), "apply_weights_to": "input"},
    "more per token than compute": {"num_experts": 2, "zero_computation": ZeroComputation(zero=2, copy=2), "top_k": 5},
}
COMPUTE = {
    "sparse": {},
    "buffer": {"buffer_factor": 0.6},
    "windows": {"buffer_factor": 0.4, "overflow": "chunks"},
    "dense": {"implementation": "dense"},
    "capacity": {"implementation": "dense", "capacity_factor": 0.7},
    "wide_capacity": {"implementation": "dense", "capacity_factor": 2.5},
}
each_family = pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
each_compute = pytest.mark.parametrize("compute", COMPUTE.values(), ids=COMPUTE)


def make(dtype: torch.dtype = torch.float64, *, correction_bias: Any = 0.0, **options: Any) -> MoE:
    """A small layer with random values in all parameters, biases included."""
    torch.set_num_threads(1)  # more threads would only wait for each other at this size
    layer = MoE(MoEConfig(**{**SIZES, **options}), dtype=dtype)
    with torch.no_grad():
        for value in filter(Tensor.is_floating_point, layer.state_dict().values()):  # a table of experts is random
            value.copy_(0.5 * torch.randn(value.shape, dtype=torch.float64))
        if layer.config.score_correction_bias:
            layer.router.score_correction_bias += torch.as_tensor(correction_bias)
    return layer


def tokens(layer: MoE, *shape: int) -> Tensor:
    x = torch.randn(*(shape or (2, 5)), layer.config.hidden_size, dtype=torch.float64)
    return x.to(layer.router.weight.dtype)


def padded(layer: MoE, mask: Tensor) -> Tensor:
    """Tokens with NaN and infinities in the padding."""
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e300], dtype=torch.float64)
    x = tokens(layer, *mask.shape)
    return torch.where(mask.unsqueeze(-1), x, bad.repeat(9)[: x.shape[-1]].to(x.dtype))


def others_for(layer: MoE, x: Tensor, token_mask: Tensor | None = None) -> dict[str, Tensor]:
    """What the router takes beside x, the same for every x of one shape; for padding, unknown ids and NaN."""
    rule, others = layer.config.router_rule, {}
    if rule.takes_ids is not None:
        numbers = torch.arange(x[..., 0].numel()).view(x.shape[:-1])
        ids = numbers * 7 % rule.num_ids if rule.num_ids else numbers // 2 % 2 - 1
        others["router_inputs"] = ids if token_mask is None else ids.masked_fill(~token_mask, -9)
    if rule.takes_state:
        generator = torch.Generator().manual_seed(2)
        state = torch.randn(*x.shape[:-1], rule.state_size, generator=generator, dtype=torch.float64)
        state = state.to(torch.promote_types(x.dtype, torch.float32))
        others["router_state"] = state if token_mask is None else state.masked_fill(~token_mask[..., None], torch.nan)
    return others


def differentiate(outputs: tuple[Tensor, ...], leaves: dict[str, Tensor], cotangents: list[Tensor]) -> Result:
    """Runs backward as training does: the gradients are added to the leaves."""
    for leaf in leaves.values():
        leaf.grad = None
    roots = [(out, c) for out, c in zip(floating(outputs), cotangents, strict=True) if out.requires_grad]
    if roots:  # the reference has none if nothing is routed
        torch.autograd.backward(*zip(*roots, strict=True))
    return Result(tuple(out.detach() for out in outputs), {name: leaf.grad for name, leaf in leaves.items()})


def leaves_of(x: Tensor, others: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a layer with a gradient."""
    inputs = {"x": x, **others}
    return {name: value.detach().requires_grad_() for name, value in inputs.items() if value.is_floating_point()}


def outcome(
    layer: MoE, x: Tensor, forward: Callable[..., Any] | None = None, token_mask: Tensor | None = None
) -> Result:
    """Outputs, and the gradients of inputs and of all parameters; `forward` is called in the place of the layer."""
    others = others_for(layer, x, token_mask)
    leaves = leaves_of(x, others)
    others = {**others, **{name: leaf for name, leaf in leaves.items() if name != "x"}}
    hidden_states, aux_loss, stats, *state = (layer if forward is None else forward)(
        leaves["x"], *([] if token_mask is None else [token_mask]), **others
    )
    outputs = (hidden_states, aux_loss, stats.tokens_per_expert, stats.dropped, *state)
    return differentiate(outputs, {**leaves, **dict(layer.named_parameters())}, cotangents_of(outputs))


def specification(layer: MoE, x: Tensor, got: Result, token_mask: Tensor | None = None) -> Result:
    """The results of the reference in float64, for the same values and upstream gradients."""
    values, rule = layer.state_dict().items(), layer.config.router_rule
    state = {name: value.double().requires_grad_() for name, value in values if value.is_floating_point()}
    others = others_for(layer, x, token_mask)
    leaves = leaves_of(x.double(), {name: value.double() for name, value in others.items() if name == "router_state"})
    x, previous, ids = leaves["x"], leaves.get("router_state"), others.get("router_inputs")
    outputs = reference.moe(x, layer.config, {**dict(values), **state}, token_mask, previous, ids)
    if rule.state_size is not None:
        if token_mask is not None:
            x = x.masked_fill(~token_mask[..., None], 0.0)
            previous = None if previous is None else previous.masked_fill(~token_mask[..., None], 0.0)
        outputs = (*outputs, rule.reference_state(x, state, previous))  # type: ignore[attr-defined]
    cotangents = [cotangent.double() for cotangent in cotangents_of(got.outputs)]
    return differentiate(outputs, {**leaves, **state}, cotangents)


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
    assert set(got.gradients) - {"x", "router_state"} == set(dict(layer.named_parameters()))
    assert_same(got, specification(layer, x, got, token_mask), relative)
